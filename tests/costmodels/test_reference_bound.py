"""Critical paths of simulated layouts against the exact step of others of their shape."""

import random

import numpy as np
import pytest
from small_worlds import llama_8b, mixtral

from costmodels.bounds.reference import reference_bound, reference_of
from costmodels.hardware import make_cluster
from costmodels.job import Target, TrainingJob
from costmodels.layout import Layout, Recompute, Schedule, split_layers
from costmodels.layout_table import table_of
from costmodels.model import MixtureOfExperts
from costmodels.profiles.reader import read_profile
from costmodels.time.estimate import step_seconds
from costmodels.time.layouts import layout_costs

H100 = read_profile("h100-sxm-80gb")
DENSE = llama_8b(num_layers=24)
EXPERTS = mixtral(
    num_layers=24,
    moe=MixtureOfExperts(
        num_experts=8, experts_per_token=2, ffn_hidden_size=2048, num_dense_layers=3
    ),
)
SHAPES = [
    (Schedule.INTERLEAVED, 4, 2, 8),
    (Schedule.INTERLEAVED, 4, 3, 8),
    (Schedule.ZERO_BUBBLE, 8, 2, 8),
    (Schedule.ZBV, 4, 2, 5),
    (Schedule.DUALPIPEV, 4, 2, 8),
    (Schedule.ONE_F_ONE_B, 8, 1, 6),
]


def layout_of(rng, schedule, pipeline, stages, micro_batches):
    """A layout of a shape on 32 GPUs; its sharding, placement and recomputation are drawn."""
    tensor = rng.choice([1, 2, 4])
    data = 32 // (pipeline * tensor)
    recompute = rng.choice(list(Recompute))
    return Layout(
        data_parallel=data,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        zero_stage=rng.choice([0, 1, 3]),
        zero_group=data,
        micro_batch_size=rng.choice([1, 2]),
        num_micro_batches=micro_batches,
        stages_per_rank=stages,
        schedule=schedule,
        recompute=recompute,
        recompute_layers=rng.choice([0, 1]) if recompute is Recompute.FULL else 0,
        sequence_parallel=tensor > 1,
        layers_per_stage=split_layers(24, pipeline * stages),
        rank_order=rng.choice([("tp", "cp", "dp", "pp"), ("tp", "pp", "cp", "dp")]),
    )


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0].value}-{shape[2]}")
@pytest.mark.parametrize("target", [Target.NATIVE, Target.DEEPSPEED])
def test_references_are_not_above_exact_steps_of_their_shape(shape, target):
    rng = random.Random(str(shape))  # noqa: S311 - layouts, not secrets
    for model in (DENSE, EXPERTS):
        layouts = [layout_of(rng, *shape) for _ in range(12)]
        job = TrainingJob(seq_len=2048, global_batch_size=64, target=target)
        cluster = make_cluster(H100, 32)
        paths, exact = [], []
        for layout in layouts:
            costs = layout_costs(model, job, cluster, table_of([layout]), layout.recompute_modules)
            paths.append(reference_of(model, job, layout, costs))
            exact.append(step_seconds(model, job, cluster, layout, costs))
        bounds = reference_bound(model, job, cluster, table_of(layouts))
        split = layouts[0].layers_per_stage
        redone = np.array(
            [
                float(layout.recompute_layers or 24) if layout.recompute is Recompute.FULL else 0.0
                for layout in layouts
            ]
        )
        ranks = tuple(map(layouts[0].rank_of_stage, range(layouts[0].num_stages)))
        rows = np.arange(len(layouts))
        every = np.array([bounds.seconds(rows, ranks, split, redone, (path,)) for path in paths])
        assert (every <= np.array(exact)).all()
        # What a layout's own path leaves out is what the slowest rank does once per step.
        assert (every.diagonal() > 0.6 * np.array(exact)).all()
        together = bounds.seconds(rows, ranks, split, redone, tuple(paths))
        assert together == pytest.approx(every.max(axis=0))
