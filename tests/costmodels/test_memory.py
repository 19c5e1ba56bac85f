"""Memory of whole layouts: moments, parts, host memory, context, and measured peaks."""

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.hardware import make_cluster
from costmodels.job import Optimizer, Precision, Switches, Target, TrainingJob
from costmodels.layout import Layout, Offload, Recompute, Schedule
from costmodels.layout_table import table_of
from costmodels.memory.estimate import estimate_memory
from costmodels.memory.framework import cached_bytes, communicator_bytes
from costmodels.model import MixtureOfExperts, ModelSpec
from costmodels.profiles.reader import read_profile
from costmodels.terms import MemoryParts
from costmodels.units import GIB

A100, H100, B200 = (
    read_profile(name) for name in ("a100-sxm-80gb", "h100-sxm-80gb", "b200-sxm-180gb")
)
LLAMA_7B = ModelSpec(
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
LLAMA_70B_12_LAYERS = ModelSpec(
    name="llama-3.1-70b-l12",
    architecture="llama",
    hidden_size=8192,
    num_layers=12,
    num_attention_heads=64,
    num_kv_heads=8,
    head_dim=128,
    ffn_hidden_size=28672,
    vocab_size=128256,
    training_seq_len=8192,
)


def job(target=Target.MEGATRON, seq_len=4096, batch=64, **changes):
    return TrainingJob(seq_len=seq_len, global_batch_size=batch, target=target, **changes)


def estimate(layout, *, model=LLAMA_7B, what=None, profile=H100, gpus=64):
    return estimate_memory(model, what or job(), make_cluster(profile, gpus), layout)


def pipeline(ranks, *, micro_batches=16, **changes):
    layers = changes.pop("layers_per_stage", (32 // ranks,) * ranks)
    return Layout(
        pipeline_parallel=ranks,
        num_micro_batches=micro_batches,
        layers_per_stage=layers,
        **changes,
    )


# --- measured: public logs of eight B200 (MooreThreads/SimuMax, docs/b200), GiB allocated -------


@pytest.mark.parametrize(
    ("tensor", "stages", "data", "measured"),
    [(1, 2, 4, 66.55), (2, 1, 4, 60.68), (4, 1, 2, 39.07), (8, 1, 1, 28.29)],
)
def test_truncated_llama_on_b200_is_within_one_and_a_half_percent(tensor, stages, data, measured):
    layout = Layout(
        data_parallel=data,
        tensor_parallel=tensor,
        pipeline_parallel=stages,
        zero_stage=1,
        zero_group=data,
        num_micro_batches=8,
        sequence_parallel=tensor > 1,
        layers_per_stage=(12 // stages,) * stages,
    )
    what = job(batch=8 * data, grad_dtype="fp32")
    memory = estimate(layout, model=LLAMA_70B_12_LAYERS, what=what, profile=B200, gpus=8)
    assert memory.parts.allocated / GIB == pytest.approx(measured, rel=0.015)


# --- moments ----------------------------------------------------------------------------------


def test_the_first_rank_of_1f1b_holds_a_micro_batch_per_stage():
    ranks = estimate(pipeline(4)).per_rank
    per_micro_batch = ranks[2].activations / 2
    assert ranks[0].activations == pytest.approx(4 * per_micro_batch)
    assert ranks[1].activations == pytest.approx(3 * per_micro_batch)


def test_gpipe_holds_every_micro_batch_on_every_rank():
    ranks = estimate(pipeline(4, schedule=Schedule.GPIPE)).per_rank
    one_f_one_b = estimate(pipeline(4)).per_rank
    assert ranks[0].activations == pytest.approx(4 * one_f_one_b[0].activations)
    assert ranks[2].activations == pytest.approx(ranks[0].activations)


def test_zero_bubble_has_the_memory_of_1f1bs_first_rank():
    zero_bubble = estimate(pipeline(4, schedule=Schedule.ZERO_BUBBLE)).per_rank
    assert zero_bubble[0].activations == estimate(pipeline(4)).per_rank[0].activations


def test_interleaving_holds_more_than_1f1b():
    interleaved = pipeline(
        4, schedule=Schedule.INTERLEAVED, stages_per_rank=2, layers_per_stage=(4,) * 8
    )
    # 2 * 3 + 4 + 1 chunks of four layers against four stages of eight.
    ratio = (
        estimate(interleaved).per_rank[0].activations
        / estimate(pipeline(4)).per_rank[0].activations
    )
    assert ratio == pytest.approx(11 * 4 / (4 * 8))


def test_the_heaviest_stage_is_named():
    memory = estimate(pipeline(4, layers_per_stage=(6, 6, 6, 14), recompute=Recompute.FULL), gpus=4)
    assert memory.worst_rank == 3
    assert memory.parts == memory.per_rank[3]
    assert memory.parts.reserved == max(parts.reserved for parts in memory.per_rank)


def test_head_and_embedding_burden_the_ends_of_a_pipeline_only():
    ranks = estimate(pipeline(4)).per_rank
    assert ranks[0].parameters - ranks[1].parameters == 2 * 32000 * 4096
    assert ranks[3].parameters - ranks[1].parameters == 2 * (32000 * 4096 + 4096)
    assert ranks[1].logits == ranks[2].logits == 0


def test_full_recomputation_keeps_inputs_and_brings_one_layer_back():
    what = job(Target.NATIVE)
    full = estimate(pipeline(1, recompute=Recompute.FULL), what=what).parts
    none = estimate(pipeline(1), what=what).parts
    streams = 32 + 2  # a layer's input each, input and output of the final norm
    assert full.activations == streams * 2 * 4096 * 4096
    assert none.activations > 10 * full.activations
    assert none.transient < full.transient + full.logits


def test_each_layer_that_is_not_recomputed_keeps_its_activations():
    sizes = [
        estimate(
            pipeline(1, recompute=Recompute.FULL, recompute_layers=layers),
            what=job(Target.NATIVE),
        ).parts.activations
        for layers in (30, 31, 32)
    ]
    assert sizes[0] - sizes[1] == pytest.approx(sizes[1] - sizes[2])
    assert sizes[0] > sizes[1] > sizes[2]


def test_an_optimizer_that_casts_gradients_may_have_its_peak_at_the_step():
    what = job(seq_len=128, batch=1, precision=Precision.FP16)
    parts = estimate(pipeline(1, micro_batches=1), what=what, profile=B200, gpus=1).parts
    assert parts.activations == 0
    assert parts.transient == 4 * 6_738_415_616


# --- parts, host, options ---------------------------------------------------------------------


def test_parts_sum_to_allocated_and_reserved():
    parts = estimate(pipeline(2)).parts
    inside = ("parameters", "gradients", "optimizer", "activations", "logits", "transient")
    assert parts.allocated == pytest.approx(sum(getattr(parts, name) for name in inside))
    everything = sum(getattr(parts, part.name) for part in fields(MemoryParts))
    assert parts.reserved == pytest.approx(everything)
    assert parts.framework > 0.5 * GIB


def test_the_interval_holds_the_central_figure():
    memory = estimate(pipeline(2))
    low, high = memory.reserved_interval
    assert low < memory.parts.reserved < high


def test_memory_that_others_took_counts_against_the_card():
    free = estimate(pipeline(1)).parts
    taken = estimate(pipeline(1), what=job(memory_taken=10 * GIB)).parts
    assert taken.allocated == free.allocated
    assert 8 * GIB < taken.reserved - free.reserved <= 10 * GIB


def test_offloading_needs_host_memory_for_all_ranks_of_a_node():
    layout = Layout(
        data_parallel=8,
        zero_stage=3,
        zero_group=8,
        offload=(Offload.OPTIMIZER, Offload.PARAMETERS),
        recompute=Recompute.FULL,
        num_micro_batches=8,
        layers_per_stage=(32,),
    )
    memory = estimate(layout, what=job(Target.DEEPSPEED), profile=A100, gpus=8)
    assert memory.host_per_node == pytest.approx(18 * 6_738_415_616 * 4 / 3)
    assert memory.parts.optimizer == 0
    assert memory.parts.allocated > 2 * GIB  # gathered layers, buckets, activations: never nothing


def test_offloaded_activations_leave_two_layers_and_go_to_the_host():
    layout = Layout(num_micro_batches=4, layers_per_stage=(32,))
    what = job(Target.NATIVE)
    moved = estimate(replace(layout, offload=(Offload.ACTIVATIONS,)), what=what, gpus=1)
    kept = estimate(layout, what=what, gpus=1)
    assert moved.parts.activations < kept.parts.activations / 10
    assert moved.host_per_node > 0.9 * kept.parts.activations
    assert kept.host_per_node == 0


def test_without_expert_parallelism_sharded_training_gathers_every_expert():
    moe = MixtureOfExperts(num_experts=16, experts_per_token=2, ffn_hidden_size=4096)
    model = replace(LLAMA_7B, moe=moe)
    layout = Layout(data_parallel=16, zero_stage=3, zero_group=16, layers_per_stage=(32,))
    what = job(Target.DEEPSPEED, batch=16)
    gathered = estimate(layout, model=model, what=what).parts.parameters
    spread = estimate(replace(layout, expert_parallel=16), model=model, what=what).parts.parameters
    experts_of_two_layers = 2 * 2 * 16 * 3 * 4096 * 4096
    assert gathered - spread > 0.9 * experts_of_two_layers


def test_communicators_cost_by_number_and_size_of_groups():
    tables = [
        Layout(data_parallel=8, layers_per_stage=(32,)),
        Layout(data_parallel=2, tensor_parallel=2, pipeline_parallel=2, layers_per_stage=(16, 16)),
        Layout(layers_per_stage=(32,)),
    ]
    cluster = make_cluster(A100, 8)
    eight, cube, alone = communicator_bytes(
        LLAMA_7B, job(Target.NATIVE), cluster, table_of(tables)
    ).tolist()
    assert eight == 688e6
    assert cube == 3 * 544e6
    assert alone == 0


def test_the_cache_gives_way_on_a_full_card():
    cluster = make_cluster(A100, 8)
    roomy = cached_bytes(job(), cluster, 10e9, 0.0, 50e9)
    full = cached_bytes(job(), cluster, 10e9, 0.0, 0.0)
    switches = Switches(expandable_segments=True)
    expandable = cached_bytes(job(switches=switches), cluster, 10e9, 0.0, 50e9)
    assert roomy > full == expandable == 0


def test_eight_bit_states_are_the_cheaper_adam():
    sizes = [
        estimate(pipeline(1), what=job(optimizer=optimizer), gpus=1).parts.optimizer
        for optimizer in (Optimizer.ADAMW, Optimizer.ADAMW_8BIT, Optimizer.SGD)
    ]
    assert sizes[0] == 2 * sizes[1]
    assert sizes[2] == 0


@given(
    target=st.sampled_from(list(Target)),
    schedule=st.sampled_from([Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE]),
    stage=st.integers(0, 3),
    size=st.sampled_from([1, 2]),
)
@settings(deadline=None, max_examples=60)
def test_a_larger_micro_batch_never_takes_less(target, schedule, stage, size):
    def peak(micro_batch):
        layout = pipeline(
            2,
            data_parallel=4,
            zero_stage=stage,
            zero_group=4,
            schedule=schedule,
            micro_batch_size=micro_batch,
        )
        return estimate(layout, what=job(target, batch=64 * micro_batch)).parts.reserved

    assert peak(2 * size) >= peak(size) > 0


@given(recompute=st.sampled_from(list(Recompute)), target=st.sampled_from(list(Target)))
def test_recomputation_never_takes_more_than_none(recompute, target):
    none = estimate(pipeline(2), what=job(target)).parts
    assert (
        estimate(pipeline(2, recompute=recompute), what=job(target)).parts.reserved <= none.reserved
    )
