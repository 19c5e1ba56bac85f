"""The bound of a table never exceeds the exact memory of any partition of its layers."""

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.hardware import make_cluster
from costmodels.job import Optimizer, Target, TrainingJob
from costmodels.layout import Layout, Recompute, Schedule
from costmodels.layout_table import table_of
from costmodels.memory.estimate import blocks_of_layout, estimate_memory, memory_lower_bound
from costmodels.memory.moments import Moment
from costmodels.memory.stages import stage_memory
from costmodels.model import MixtureOfExperts, ModelSpec
from costmodels.profiles.reader import read_profile

PROFILE = read_profile("h100-sxm-80gb")
DENSE = ModelSpec(
    name="dense",
    architecture="llama",
    hidden_size=256,
    num_layers=6,
    num_attention_heads=8,
    num_kv_heads=4,
    head_dim=32,
    ffn_hidden_size=704,
    vocab_size=8192,
    training_seq_len=512,
)
EXPERTS = replace(
    DENSE,
    moe=MixtureOfExperts(
        num_experts=8, experts_per_token=2, ffn_hidden_size=256, num_dense_layers=2
    ),
)
STAGES = {
    Schedule.GPIPE: 1,
    Schedule.ONE_F_ONE_B: 1,
    Schedule.INTERLEAVED: 2,
    Schedule.ZERO_BUBBLE: 1,
    Schedule.ZBV: 2,
    Schedule.DUALPIPEV: 2,
}


def partitions(num_layers, num_stages):
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        edges = (0, *cuts, num_layers)
        yield tuple(b - a for a, b in pairwise(edges))


@st.composite
def layouts(draw):
    schedule = draw(st.sampled_from(list(STAGES)))
    pipeline = draw(st.sampled_from([2, 3]))
    if schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B):
        pipeline = draw(st.sampled_from([1, 2, 3]))
    data = draw(st.sampled_from([1, 2, 4]))
    return Layout(
        data_parallel=data,
        tensor_parallel=draw(st.sampled_from([1, 2])),
        pipeline_parallel=pipeline,
        zero_stage=draw(st.sampled_from([0, 1, 2, 3])),
        zero_group=data,
        micro_batch_size=draw(st.sampled_from([1, 4])),
        num_micro_batches=pipeline * draw(st.sampled_from([2, 4])),
        stages_per_rank=STAGES[schedule],
        schedule=schedule,
        recompute=draw(st.sampled_from(list(Recompute))),
        recompute_layers=draw(st.sampled_from([0, 1, 2])),
        layers_per_stage=(1,) * (pipeline * STAGES[schedule]),
    )


@given(
    layout=layouts(),
    model=st.sampled_from([DENSE, EXPERTS]),
    target=st.sampled_from(list(Target)),
)
@settings(max_examples=150, deadline=None)
def test_no_partition_goes_below_the_bound(layout, model, target):
    job = TrainingJob(seq_len=512, global_batch_size=layout.global_batch_size, target=target)
    cluster = make_cluster(PROFILE, 48)
    bound = memory_lower_bound(model, job, cluster, table_of([layout]))[0]
    exact = min(
        estimate_memory(model, job, cluster, replace(layout, layers_per_stage=split)).parts.reserved
        for split in partitions(model.num_layers, layout.num_stages)
    )
    assert 0 < bound <= exact


@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.GPIPE])
def test_the_bound_is_near_the_best_partition(schedule):
    model = replace(DENSE, num_layers=8)
    layout = Layout(
        pipeline_parallel=4,
        num_micro_batches=16,
        micro_batch_size=16,
        schedule=schedule,
        layers_per_stage=(2, 2, 2, 2),
    )
    job = TrainingJob(seq_len=512, global_batch_size=256)
    cluster = make_cluster(PROFILE, 4)
    bound = memory_lower_bound(model, job, cluster, table_of([layout]))[0]
    best = min(
        estimate_memory(model, job, cluster, replace(layout, layers_per_stage=split)).parts.reserved
        for split in partitions(8, 4)
    )
    assert bound > 0.8 * best


def test_a_table_gives_each_row_what_it_gives_alone():
    rows = [
        Layout(layers_per_stage=(6,), data_parallel=2, zero_group=2, zero_stage=stage)
        for stage in range(4)
    ] + [
        Layout(
            pipeline_parallel=3,
            num_micro_batches=6,
            layers_per_stage=(2, 2, 2),
            recompute=Recompute.FULL,
        )
    ]
    job = TrainingJob(seq_len=512, global_batch_size=8, optimizer=Optimizer.ADAMW)
    cluster = make_cluster(PROFILE, 8)
    together = memory_lower_bound(EXPERTS, job, cluster, table_of(rows))
    alone = [memory_lower_bound(EXPERTS, job, cluster, table_of([row]))[0] for row in rows]
    assert np.array_equal(together, alone)


def test_stage_memory_adds_up_to_the_estimate_of_the_last_rank():
    layout = Layout(
        pipeline_parallel=2,
        num_micro_batches=8,
        micro_batch_size=8,
        layers_per_stage=(3, 3),
    )
    job = TrainingJob(seq_len=512, global_batch_size=64)
    cluster = make_cluster(PROFILE, 2)
    blocks = blocks_of_layout(DENSE, job, cluster, layout)
    stages = stage_memory(DENSE, job, cluster, layout, blocks)
    (_, layer), (moment,) = stages.layers[0], stages.moments[0]
    by_hand = (
        stages.fixed
        + stages.embedding.states
        + 3 * (layer.states + moment.in_flight * layer.kept)
        + stages.moving[0].some_kept
    )
    parts = estimate_memory(DENSE, job, cluster, layout).per_rank[0]
    cached = parts.reserved - by_hand
    assert 0 <= cached <= 0.35 * (parts.activations + parts.logits + parts.transient)
    assert moment == Moment(until_input=(2,), put_off=(0,), before_b=True, before_i=False)
