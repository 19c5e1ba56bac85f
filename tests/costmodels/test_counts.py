"""Counts by hand on a network small enough to write out."""

import pytest

from costmodels.counts.ranks import count_rank
from costmodels.job import Switches, Target, TrainingJob
from costmodels.layout import Layout, Recompute
from costmodels.model import ModelSpec

# H 64, 4 heads and 2 key-value heads of 16, F 128, V 256, 4 layers; 2 sequences of 32 tokens.
MODEL = ModelSpec(
    name="four",
    architecture="llama",
    hidden_size=64,
    num_layers=4,
    num_attention_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_hidden_size=128,
    vocab_size=256,
    training_seq_len=32,
)
TOKENS = 64
# Weights in products of a layer: q and o 2 * 64 * 64, k and v 2 * 64 * 32, three of 64 * 128.
LAYER = 2 * TOKENS * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
# Two products of 32 x 32 x 16 per head, half of the square, 4 heads, 2 sequences.
ATTENTION = 2 * 2 * (32 * 32 // 2) * 16 * 4 * 2
HEAD = 2 * TOKENS * 64 * 256
FLOPS = 4 * (3 * LAYER + ATTENTION * 7 // 2) + 3 * HEAD


def job(batch=2, target=Target.NATIVE, **switches):
    return TrainingJob(
        seq_len=32, global_batch_size=batch, target=target, switches=Switches(**switches)
    )


def layout(**changes):
    settings = {"micro_batch_size": 2, "layers_per_stage": (4,)}
    return Layout(**(settings | changes))


def of(axis, counts):
    return dict(counts.num_bytes).get(axis, 0)


def test_flops_of_a_step_by_hand():
    counts = count_rank(MODEL, job(), layout(), 0)
    assert counts.flops == FLOPS
    assert counts.num_bytes == ()


def test_every_micro_batch_counts():
    counts = count_rank(MODEL, job(6), layout(num_micro_batches=3), 0)
    assert counts.flops == 3 * FLOPS


def test_full_recomputation_adds_the_forward_but_for_its_last_product():
    counts = count_rank(MODEL, job(), layout(recompute=Recompute.FULL), 0)
    last = 2 * TOKENS * 64 * 128
    assert counts.flops == FLOPS + 4 * (LAYER + ATTENTION - last)


def test_recomputing_some_layers_adds_these_only():
    once = count_rank(MODEL, job(), layout(recompute=Recompute.FULL, recompute_layers=1), 0)
    last = 2 * TOKENS * 64 * 128
    assert once.flops == FLOPS + LAYER + ATTENTION - last


def test_selective_recomputation_adds_attention_forward():
    counts = count_rank(MODEL, job(), layout(recompute=Recompute.SELECTIVE), 0)
    assert counts.flops == FLOPS + 4 * ATTENTION


def test_stages_share_the_flops():
    split = layout(pipeline_parallel=2, layers_per_stage=(1, 3))
    both = [count_rank(MODEL, job(), split, rank).flops for rank in (0, 1)]
    assert sum(both) == FLOPS
    assert both[0] == 3 * LAYER + ATTENTION * 7 // 2


def test_tensor_ranks_share_the_flops():
    cut = layout(tensor_parallel=2)
    assert count_rank(MODEL, job(), cut, 0).flops * 2 == FLOPS


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_bytes_by_hand(sequence_parallel):
    cut = layout(tensor_parallel=2, sequence_parallel=sequence_parallel)
    activation = 2 * TOKENS * 64
    # Two regions a layer, once each way (with sequence parallelism: two collectives each way),
    # the embedding and the head one half each, and three fp32 numbers a token for the loss.
    regions = 4 * 2 * 2 + 2
    expected = activation * regions * (2 if sequence_parallel else 1) + 3 * 4 * TOKENS
    norms = (4 * 2 + 1) * 64 * 4 if sequence_parallel else 0
    assert of("tp", count_rank(MODEL, job(), cut, 0)) == expected + norms


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_gate_apart_reduces_its_own_input_gradient(sequence_parallel):
    cut = layout(tensor_parallel=2, sequence_parallel=sequence_parallel)
    activation = 2 * TOKENS * 64
    together, apart = (
        of("tp", count_rank(MODEL, job(separate_gates=split), cut, 0)) for split in (False, True)
    )
    # One more all-reduce in backward of each of 4 layers; a split sequence is gathered once.
    assert apart - together == (0 if sequence_parallel else 4 * activation)


def test_a_loss_over_the_whole_vocabulary_gathers_the_logits():
    cut = layout(tensor_parallel=2)
    fused, whole = (
        of("tp", count_rank(MODEL, job(target=Target.DEEPSPEED, fused_cross_entropy=one), cut, 0))
        for one in (True, False)
    )
    # 16-bit logits of 256 tokens of the vocabulary instead of three fp32 numbers a token.
    assert whole - fused == TOKENS * (2 * 256 - 3 * 4)


def test_pipeline_sends_activations_on_and_gradients_back():
    split = layout(pipeline_parallel=2, layers_per_stage=(2, 2), num_micro_batches=3)
    for rank in (0, 1):
        assert of("pp", count_rank(MODEL, job(6), split, rank)) == 3 * 2 * TOKENS * 64


WEIGHTS = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64) + 64 + 2 * 256 * 64


def test_gradients_are_reduced_once_a_step_in_fp32():
    spread = layout(data_parallel=4, num_micro_batches=3)
    assert of("dp", count_rank(MODEL, job(24), spread, 0)) == 4 * WEIGHTS


def test_zero_1_also_gathers_the_new_weights():
    spread = layout(data_parallel=4, zero_stage=1, zero_group=4)
    assert of("dp", count_rank(MODEL, job(8), spread, 0)) == (4 + 2) * WEIGHTS


def test_zero_3_gathers_twice_and_reduces_once_per_micro_batch():
    spread = layout(data_parallel=4, zero_stage=3, zero_group=4, num_micro_batches=3)
    assert of("dp", count_rank(MODEL, job(24), spread, 0)) == 3 * (4 + 2 * 2) * WEIGHTS
