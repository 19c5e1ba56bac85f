"""Model states against arithmetic by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.job import Optimizer, Precision, Target, TrainingJob
from costmodels.layout import Layout, Offload
from costmodels.layout_table import table_of
from costmodels.memory.states import embedding_states, head_states, layer_states
from costmodels.memory.weight_bytes import bytes_per_weight, reduced_bytes
from costmodels.model import LayerKind, MixtureOfExperts, ModelSpec
from costmodels.network.shard import padded_rows
from costmodels.parameters import layer_parameters

DENSE = LayerKind(window=None, has_experts=False)
ROUTED = LayerKind(window=None, has_experts=True)
LLAMA = ModelSpec(
    name="llama-2-7b",
    architecture="llama",
    hidden_size=4096,
    num_layers=32,
    num_attention_heads=32,
    num_kv_heads=32,
    head_dim=128,
    ffn_hidden_size=11008,
    vocab_size=32000,
    training_seq_len=4096,
)
MIXTRAL = replace(
    LLAMA,
    num_kv_heads=8,
    moe=MixtureOfExperts(num_experts=8, experts_per_token=2, ffn_hidden_size=14336),
)


def job(**changes):
    return TrainingJob(**{"seq_len": 1024, "global_batch_size": 8, **changes})


def one(**changes):
    return table_of([Layout(layers_per_stage=(32,), **changes)])


def total(model, job, table):
    layers = model.num_layers * layer_states(model, job, DENSE, table).total
    rest = embedding_states(model, job, table).total + head_states(model, job, table).total
    return float((layers + rest)[0])


def test_adam_takes_sixteen_bytes_per_weight_with_sixteen_bit_gradients():
    states = total(LLAMA, job(target=Target.DEEPSPEED), one())
    assert states == 16 * 6_738_415_616


def test_gradients_in_fp32_take_two_bytes_more():
    states = total(LLAMA, job(target=Target.MEGATRON, grad_dtype="fp32"), one())
    assert states == 18 * 6_738_415_616


@pytest.mark.parametrize(("stage", "per_weight"), [(0, 16.0), (1, 5.5), (2, 3.75), (3, 2.0)])
def test_each_zero_stage_divides_one_more_part_by_eight(stage, per_weight):
    table = one(data_parallel=8, zero_stage=stage, zero_group=8)
    states = layer_states(LLAMA, job(target=Target.DEEPSPEED), DENSE, table)
    weights = layer_parameters(LLAMA, DENSE).total
    assert float(states.total[0]) == pytest.approx(per_weight * weights)


def test_a_shard_group_of_two_divides_by_two_whatever_the_replicas():
    table = one(data_parallel=8, zero_stage=3, zero_group=2)
    states = layer_states(LLAMA, job(target=Target.DEEPSPEED), DENSE, table)
    assert float(states.total[0]) == pytest.approx(8 * layer_parameters(LLAMA, DENSE).total)


@pytest.mark.parametrize(
    ("optimizer", "precision", "expected"),
    [
        (Optimizer.ADAMW, Precision.BF16, 12),
        (Optimizer.ADAMW_BF16, Precision.BF16, 4),
        (Optimizer.ADAMW_8BIT, Precision.BF16, 6),
        (Optimizer.SGD, Precision.BF16, 0),
        (Optimizer.ADAMW, Precision.FP32, 8),
        (Optimizer.ADAMW, Precision.FP8, 12),
    ],
)
def test_optimizer_states_per_weight(optimizer, precision, expected):
    assert bytes_per_weight(job(optimizer=optimizer, precision=precision)).optimizer == expected


@pytest.mark.parametrize("target", list(Target))
@pytest.mark.parametrize("precision", [Precision.FP8, Precision.MXFP8, Precision.NVFP4])
def test_low_precision_never_makes_states_smaller(target, precision):
    table = one(data_parallel=4, zero_stage=1, zero_group=4)
    low = layer_states(LLAMA, job(target=target, precision=precision), DENSE, table).total
    assert low >= layer_states(LLAMA, job(target=target), DENSE, table).total


def test_master_weights_of_fully_sharded_training_are_the_parameters():
    table = one(data_parallel=8, zero_stage=3, zero_group=8)
    states = layer_states(LLAMA, job(target=Target.TORCHTITAN), DENSE, table)
    weights = layer_parameters(LLAMA, DENSE).total
    assert float(states.parameters[0]) == 0
    assert float(states.optimizer[0]) == pytest.approx(12 * weights / 8)
    assert float(states.gathered[0]) == 2 * weights


def test_torchtitan_keeps_weights_and_gradients_whole_in_a_pipeline():
    table = table_of(
        [
            Layout(
                pipeline_parallel=2,
                data_parallel=4,
                zero_stage=3,
                zero_group=4,
                layers_per_stage=(16, 16),
            )
        ]
    )
    states = layer_states(LLAMA, job(target=Target.TORCHTITAN), DENSE, table)
    weights = layer_parameters(LLAMA, DENSE).total
    assert float(states.parameters[0]) == 2 * weights
    assert float(states.gradients[0]) == 4 * weights
    assert float(states.gathered[0]) == 0


def test_experts_are_cut_over_their_own_group_of_ranks():
    parts = layer_parameters(MIXTRAL, ROUTED)
    table = one(data_parallel=8, expert_parallel=4, zero_stage=1, zero_group=8)
    states = layer_states(MIXTRAL, job(target=Target.DEEPSPEED), ROUTED, table)
    dense = parts.total - parts.expert_parameters
    assert float(states.parameters[0]) == 2 * (dense + parts.expert_parameters / 4)
    # Four expert ranks among eight leave two copies of each expert to share its states.
    expected = 12 * (dense / 8 + parts.expert_parameters / 4 / 2)
    assert float(states.optimizer[0]) == pytest.approx(expected)


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_zero_neither_cuts_nor_gathers_experts_that_one_rank_alone_holds(zero_stage):
    layout = {"data_parallel": 8, "zero_stage": zero_stage, "zero_group": 8}
    whole = layer_states(MIXTRAL, job(), ROUTED, one(expert_parallel=8, **layout))
    weights = layer_parameters(MIXTRAL, ROUTED)
    experts, dense = weights.expert_parameters / 8, weights.total - weights.expert_parameters
    assert float(whole.cut_weights[0]) == dense
    assert float(whole.gathered[0]) == (2 * dense if zero_stage == 3 else 0)
    # The only micro-batch of a step meets whole gradients of these experts, and no others.
    assert float(whole.gradients[0]) == 4 * experts
    assert float(whole.late_gradients[0]) == 4 * dense / 8
    pairs = layer_states(MIXTRAL, job(), ROUTED, one(expert_parallel=4, **layout))
    assert float(pairs.cut_weights[0]) == dense + 2 * experts


def test_without_expert_parallelism_every_expert_is_on_every_rank():
    table = one(data_parallel=8)
    states = layer_states(MIXTRAL, job(), ROUTED, table)
    assert float(states.local_weights[0]) == layer_parameters(MIXTRAL, ROUTED).total


def test_key_value_heads_are_copied_when_the_tensor_axis_is_longer():
    parts = layer_parameters(MIXTRAL, DENSE)
    table = one(tensor_parallel=16)
    local = float(layer_states(MIXTRAL, job(), DENSE, table).local_weights[0])
    expected = (
        (parts.query_and_output_matrices + parts.ffn_matrices) / 16
        + parts.key_value_matrices / 8
        + parts.replicated_vectors
    )
    assert local == pytest.approx(expected)


def test_megatron_pads_the_vocabulary_to_128_per_tensor_rank():
    ranks = np.array([4, 8])
    spec = replace(LLAMA, vocab_size=151_669)
    assert padded_rows(spec, Target.MEGATRON, ranks).tolist() == [
        152_064,
        152_576,
    ]


def test_a_tied_head_is_free_on_one_rank_and_a_copy_in_a_pipeline():
    tied = replace(LLAMA, tied_embeddings=True)
    whole = head_states(tied, job(target=Target.DEEPSPEED), one())
    split = table_of([Layout(pipeline_parallel=2, layers_per_stage=(16, 16))])
    copied = head_states(tied, job(target=Target.DEEPSPEED), split)
    assert float(whole.total[0]) == 16 * 4096
    assert float(copied.total[0]) == 16 * (4096 + 32000 * 4096)


def test_adapters_train_a_little_over_a_frozen_base():
    table = one()
    states = layer_states(LLAMA, job(lora_rank=8), DENSE, table)
    adapters = 8 * (4 * (4096 + 4096) + 3 * (4096 + 11008))
    assert float(states.parameters[0]) == 2 * (layer_parameters(LLAMA, DENSE).total + adapters)
    assert float(states.optimizer[0]) == 12 * adapters


def test_offloaded_states_leave_the_gpu_for_the_host():
    offload = (Offload.OPTIMIZER, Offload.PARAMETERS)
    table = one(data_parallel=8, zero_stage=3, zero_group=8, offload=offload)
    states = layer_states(LLAMA, job(target=Target.DEEPSPEED), DENSE, table)
    weights = layer_parameters(LLAMA, DENSE).total
    assert float(states.optimizer[0]) == float(states.parameters[0]) == 0
    # 12 bytes of states, 4 of fp32 gradients and 2 of weights, in pinned blocks (4 / 3).
    assert float(states.host[0]) == pytest.approx((12 + 4 + 2) * weights / 8 * 4 / 3)


@given(
    stage=st.integers(0, 3),
    replicas=st.sampled_from([1, 2, 4, 8]),
    tensor=st.sampled_from([1, 2, 4, 8]),
    target=st.sampled_from(list(Target)),
)
def test_more_sharding_never_takes_more(stage, replicas, tensor, target):
    few = one(data_parallel=replicas, tensor_parallel=tensor, zero_stage=stage, zero_group=replicas)
    more = one(
        data_parallel=2 * replicas,
        tensor_parallel=tensor,
        zero_stage=stage,
        zero_group=2 * replicas,
    )
    spent = layer_states(LLAMA, job(target=target), DENSE, few).total
    assert layer_states(LLAMA, job(target=target), DENSE, more).total <= spent


def test_accelerate_reduces_in_16_bits_what_it_keeps_in_32():
    job = TrainingJob(seq_len=2048, global_batch_size=8, target=Target.ACCELERATE)
    assert (reduced_bytes(job), bytes_per_weight(job).gradient) == (2, 4)
    assert reduced_bytes(replace(job, grad_dtype="fp32")) == 4
    assert reduced_bytes(replace(job, precision=Precision.FP32)) == 4


def test_deepspeed_sends_one_of_the_two_gradients_that_it_keeps():
    job = TrainingJob(seq_len=2048, global_batch_size=8, target=Target.DEEPSPEED, grad_dtype="fp32")
    assert (reduced_bytes(job), bytes_per_weight(job).gradient) == (4, 6)
