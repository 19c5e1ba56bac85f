"""What our own runtime does in fp32 and 16 bits, by hand: passes, messages, what runs again."""

from dataclasses import replace

import pytest

from costmodels.hardware import make_cluster
from costmodels.job import Precision, Switches, Target, TrainingJob
from costmodels.layout import Layout, Recompute
from costmodels.model import ModelSpec
from costmodels.network.ops import skipped_by_recompute
from costmodels.network.shard import shard_of
from costmodels.network.workload import build_workload
from costmodels.profiles.reader import read_profile
from costmodels.time.estimate import estimate_time, stage_costs

MODEL = ModelSpec(
    name="by-hand",
    architecture="llama",
    hidden_size=64,
    num_layers=4,
    num_attention_heads=8,
    num_kv_heads=4,
    head_dim=8,
    ffn_hidden_size=128,
    vocab_size=96,
    training_seq_len=32,
)
TP2 = Layout(
    tensor_parallel=2,
    sequence_parallel=True,
    micro_batch_size=2,
    num_micro_batches=2,
    layers_per_stage=(4,),
)
TOKENS, HIDDEN = 2 * 32, 64
STREAM = TOKENS * HIDDEN  # elements of the residual stream


def job(**changes):
    return TrainingJob(**{"seq_len": 32, "global_batch_size": 4, **changes})


FP32, BF16 = job(precision=Precision.FP32), job()
UNFUSED = job(precision=Precision.FP32, switches=Switches(fused_norm=False))


def layer_ops(job, layout=TP2, model=MODEL):
    ((_, block),) = build_workload(model, job, shard_of(layout, job)).layers
    return {op.name: op for op in block.ops}


@pytest.mark.parametrize(
    ("weights", "n", "k"),
    [(64 * 64, 64, 64), (3 * 64, 3, 64), (48 * 32, 24, 64), (3 * 32, 3, 32), (9 * 16, 9, 16)],
)
def test_what_no_rule_cuts_is_one_product_as_deep_as_the_hidden_state_allows(weights, n, k):
    product = layer_ops(BF16, model=replace(MODEL, whole_matrices=weights))["whole_matrices"]
    assert (product.n, product.k) == (n, k)
    # Two FLOPs per weight and token; sequence parallelism leaves each of two ranks half the tokens.
    assert 2 * product.m * product.n * product.k == 2 * TOKENS / 2 * weights


def head_ops(job):
    return {op.name: op for op in build_workload(MODEL, job, shard_of(TP2, job)).head.ops}


def test_an_fp32_residual_reads_two_and_writes_one_of_four_bytes():
    half = STREAM // 2  # sequence parallelism: a rank holds half of the tokens
    assert layer_ops(FP32)["attention_residual"].forward == 3 * 4 * half
    assert layer_ops(BF16)["attention_residual"].forward == 3 * 2 * half


def test_fp32_activations_travel_at_four_bytes_and_row_sums_always_do():
    for name in ("attention_enter", "attention_leave", "ffn_enter", "ffn_leave"):
        assert layer_ops(FP32)[name].payload == 4 * STREAM
        assert layer_ops(BF16)[name].payload == 2 * STREAM
    for each in (FP32, BF16):
        assert head_ops(each)["loss_reduce"].payload == 3 * 4 * TOKENS


def test_a_fused_loss_passes_its_logits_once_in_one_kernel_and_thrice_in_megatrons_parts():
    def loss(**changes):
        job = replace(BF16, **changes)
        ops = head_ops(job)
        return tuple(
            moved / (ops["logits"].m * ops["logits"].n)
            for moved in (ops["loss"].forward, ops["loss"].backward)
        )

    assert loss() == (8, 6)
    # Cast and maximum 2 + 4, shift and exponential 4 + 4, division 4 + 4; scale 4 + 4, cast back 2.
    assert loss(target=Target.MEGATRON) == (6 + 8 + 8, 8 + 2)
    assert loss(target=Target.MEGATRON, chunked_loss=True) == (8, 6)


def test_an_unfused_fp32_norm_makes_five_and_nineteen_accesses():
    norm = layer_ops(UNFUSED)["norm_0"]
    assert norm.forward == 5 * 4 * STREAM // 2
    assert norm.backward == 19 * 4 * STREAM // 2


def test_eager_rope_reads_and_writes_queries_and_keys_five_times():
    rotated = TOKENS * (4 + 2) * 8  # heads and key-value heads of one rank
    rope = layer_ops(FP32)["rope"]
    assert (rope.forward, rope.backward) == (10 * 4 * rotated, 10 * 4 * rotated)
    assert rope.forward_kernels == 10  # five for queries, five for keys
    assert layer_ops(replace(BF16, target=Target.MEGATRON))["rope"].forward == 2 * 2 * rotated


def test_the_gradients_of_products_with_one_input_are_summed_where_they_are_not_fused():
    ops = layer_ops(FP32)
    assert ops["attention_branches"].forward == 0
    assert ops["attention_branches"].backward == 2 * 3 * 4 * STREAM  # of queries, keys, values
    assert ops["ffn_branches"].backward == 1 * 3 * 4 * STREAM  # of gate and up
    assert "attention_branches" not in layer_ops(replace(FP32, target=Target.MEGATRON))
    gpt2 = replace(MODEL, architecture="gpt2", gated_ffn=False)
    assert not {"attention_branches", "ffn_branches"} & set(layer_ops(FP32, model=gpt2))


def test_recomputation_leaves_out_the_last_product_and_what_joins_its_parts():
    ((_, block),) = build_workload(MODEL, FP32, shard_of(TP2, FP32)).layers
    assert skipped_by_recompute(block) == {"ffn_out", "ffn_leave"}


def recompute_seconds(target):
    cluster = make_cluster(read_profile("h100-sxm-80gb"), 2)
    costs = stage_costs(MODEL, job(target=target), cluster, TP2)
    ((_, seconds),) = costs.layers
    return seconds.recompute, seconds.forward


def test_ours_recomputes_less_than_a_forward_and_megatron_all_of_it():
    again, forward = recompute_seconds(Target.MEGATRON)
    assert again == pytest.approx(forward)
    again, forward = recompute_seconds(Target.NATIVE)
    assert 0.5 * forward < again < forward


def test_a_pipeline_hands_on_four_bytes_an_element_in_fp32():
    profile = read_profile("cpu-gloo")
    layout = Layout(
        pipeline_parallel=2, micro_batch_size=2, num_micro_batches=2, layers_per_stage=(2, 2)
    )
    hops = [stage_costs(MODEL, each, make_cluster(profile, 2), layout).way for each in (FP32, BF16)]
    bandwidth = profile.intra_node.bandwidth * profile.calibration["intra_node_efficiency"]
    assert hops[0] - hops[1] == pytest.approx(2 * STREAM / bandwidth)


def test_the_same_step_takes_longer_in_fp32_on_the_same_peaks():
    profile = read_profile("cpu-gloo")
    peaks = {precision: profile.device.peak(precision) for precision in ("fp32", "bf16")}
    assert peaks["fp32"] is not None
    layout = replace(TP2, recompute=Recompute.FULL)
    steps = [
        estimate_time(MODEL, each, make_cluster(profile, 2), layout).step_seconds
        for each in (FP32, BF16)
    ]
    assert steps[0] > steps[1]
