"""What split backwards put off, against the exact memory of splits and recomputed layers."""

import random
from dataclasses import replace

import numpy as np
import pytest
from small_worlds import llama_8b, mixtral

from costmodels.bounds.put_off import put_off
from costmodels.hardware import make_cluster
from costmodels.job import Switches, Target, TrainingJob
from costmodels.layout import Layout, Offload, Recompute, Schedule, split_layers
from costmodels.layout_table import table_of
from costmodels.memory.estimate import estimate_memory
from costmodels.model import MixtureOfExperts
from costmodels.profiles.reader import read_profile
from costmodels.schedule import PipelineShape, shape_refusals
from costmodels.virtual_splits import virtual_splits

CLUSTER = make_cluster(read_profile("h100-sxm-80gb"), 64)
LAYERS = 24
DENSE = llama_8b(num_layers=LAYERS)
EXPERTS = mixtral(
    num_layers=LAYERS,
    moe=MixtureOfExperts(
        num_experts=8, experts_per_token=2, ffn_hidden_size=2048, num_dense_layers=3
    ),
)
# The bound leaves the loss out, and an eager one is the peak of what little is put off here.
FUSED = Switches(fused_cross_entropy=True)
SPLIT_BACKWARDS = (Schedule.ZERO_BUBBLE, Schedule.ZBV, Schedule.DUALPIPEV)


def layout_of(rng):
    """A layout of a schedule that splits backwards, in any shape that it admits."""
    schedule, pipeline = rng.choice(SPLIT_BACKWARDS), rng.choice([2, 3, 4, 5, 8])
    stages = rng.choice([1, 2, 3]) if schedule is Schedule.ZERO_BUBBLE else 2
    shape = PipelineShape(
        schedule=schedule,
        pipeline_parallel=pipeline,
        stages_per_rank=stages,
        num_micro_batches=rng.randint(1, 3 * pipeline),
    )
    refusals = shape_refusals(shape)
    micro_batches = refusals[0].allowed[0] if refusals else shape.num_micro_batches
    tensor = rng.choice([1, 2])
    return Layout(
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        data_parallel=2,
        zero_stage=rng.choice([0, 1]),
        zero_group=2,
        micro_batch_size=rng.choice([1, 2]),
        num_micro_batches=micro_batches,
        stages_per_rank=stages,
        schedule=schedule,
        recompute=Recompute.FULL,
        sequence_parallel=tensor > 1,
        layers_per_stage=split_layers(LAYERS, pipeline * stages),
    )


def with_split(rng, layout):
    """A layout and its row; with several stages per rank the last one may be lighter."""
    table = table_of([layout])
    if layout.stages_per_rank == 1:
        return layout, table
    given = rng.randint(0, min(3, layout.layers_per_stage[-1] - 1))
    table = replace(table, lighter_last=np.array([given]))
    (split,), _ = virtual_splits(table)
    return replace(layout, layers_per_stage=split.of_layers(LAYERS)), table


def splits_of(rng, layout):
    """The layout's own split, and others where a rank has one stage."""
    yield layout.layers_per_stage
    if layout.stages_per_rank == 1:
        for _ in range(3):
            cuts = sorted(rng.sample(range(1, LAYERS), layout.num_stages - 1))
            yield tuple(b - a for a, b in zip([0, *cuts], [*cuts, LAYERS], strict=True))


@pytest.mark.parametrize("block", range(4))
def test_no_number_of_recomputed_layers_goes_below_the_bound(block):
    near = needed = 0
    for seed in range(40 * block, 40 * block + 40):
        rng = random.Random(seed)  # noqa: S311 - layouts, not secrets
        layout, table = with_split(rng, layout_of(rng))
        model = rng.choice([DENSE, EXPERTS])
        job = TrainingJob(
            seq_len=4096,
            global_batch_size=layout.global_batch_size,
            target=rng.choice(list(Target)),
            switches=FUSED,
        )
        inputs = (model, job, CLUSTER)
        bound = put_off(*inputs, table, limit=0, known_splits=True).bound[0]
        for split in splits_of(rng, layout):
            for layers in {0, 1, rng.randint(1, max(split))}:
                one = replace(layout, layers_per_stage=split, recompute_layers=layers)
                exact = estimate_memory(model, job, CLUSTER, one).parts.reserved
                assert 0 < bound <= exact, (seed, split, layers)
                near += bound > 0.9 * exact
                fits = put_off(*inputs, table, limit=exact, known_splits=True)
                assert fits.least[0] <= (layers or max(split)), (seed, split, layers)
                needed += fits.least[0] > 1
    assert near >= 20  # of what all splits take, it says nearly all of some
    assert needed >= 5


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.SELECTIVE])
def test_no_split_without_full_recomputation_goes_below_the_bound(recompute):
    near = 0
    for seed in range(80):
        rng = random.Random(seed)  # noqa: S311 - layouts, not secrets
        layout, table = with_split(rng, replace(layout_of(rng), recompute=recompute))
        model = rng.choice([DENSE, EXPERTS])
        job = TrainingJob(
            seq_len=4096,
            global_batch_size=layout.global_batch_size,
            target=rng.choice(list(Target)),
            switches=FUSED,
        )
        found = put_off(model, job, CLUSTER, table, limit=0, known_splits=True)
        assert found.least.tolist() == [0]  # nothing is recomputed in full
        for split in splits_of(rng, layout):
            one = replace(layout, layers_per_stage=split)
            exact = estimate_memory(model, job, CLUSTER, one).parts.reserved
            assert 0 < found.bound[0] <= exact, (seed, split)
            near += found.bound[0] > 0.9 * exact
    assert near >= 10


def test_nothing_is_claimed_of_other_layouts():
    layout = layout_of(random.Random(0))  # noqa: S311 - layouts, not secrets
    job = TrainingJob(seq_len=4096, global_batch_size=layout.global_batch_size)
    whole = replace(layout, schedule=Schedule.INTERLEAVED)
    kept = replace(layout, offload=(Offload.ACTIVATIONS,))
    found = put_off(DENSE, job, CLUSTER, table_of([whole, kept]), limit=0)
    assert found.bound.tolist() == found.least.tolist() == [0, 0]
