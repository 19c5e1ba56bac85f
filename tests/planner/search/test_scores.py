"""What the solvers are told of a split is never above the exact models: seconds and bytes."""

import random
from math import inf

import numpy as np
import pytest
from small_worlds import llama_8b, mixtral

from costmodels.bounds.split import split_bound
from costmodels.hardware import make_cluster
from costmodels.job import Target, TrainingJob
from costmodels.layout import Layout, Recompute
from costmodels.layout_table import table_of
from costmodels.memory.estimate import estimate_memory
from costmodels.memory.framework import decisive_fraction
from costmodels.memory.transients import MANY_LAYERS
from costmodels.model import MixtureOfExperts
from costmodels.profiles.reader import read_profile
from costmodels.time.estimate import estimate_time
from costmodels.units import KIB
from planner.search.priced import PricedLayout
from planner.search.stage_problem import SPLIT_SCHEDULES

GPUS = 32
CLUSTER = make_cluster(read_profile("h100-sxm-80gb"), GPUS)
DENSE = llama_8b(num_layers=12)
EXPERTS = mixtral(
    num_layers=12,
    moe=MixtureOfExperts(
        num_experts=8, experts_per_token=2, ffn_hidden_size=2048, num_dense_layers=3
    ),
)
WINDOWED = llama_8b(num_layers=12, window=512, window_period=3)


def random_split(rng, layers, stages):
    cuts = sorted(rng.sample(range(1, layers), stages - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))


def priced_of(rng):
    model = rng.choice([DENSE, EXPERTS, WINDOWED])
    pipeline, tensor = rng.choice([2, 4, 8]), rng.choice([1, 2])
    data = GPUS // (pipeline * tensor)
    recompute = rng.choice(list(Recompute))
    split = random_split(rng, model.num_layers, pipeline)
    layout = Layout(
        data_parallel=data,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        zero_stage=rng.choice([0, 1, 3]),
        zero_group=data,
        num_micro_batches=rng.choice([1, 2, 3, 7, 16]),
        schedule=rng.choice(SPLIT_SCHEDULES),
        recompute=recompute,
        recompute_layers=rng.randint(1, max(split)) if recompute is Recompute.FULL else 0,
        sequence_parallel=tensor > 1,
        layers_per_stage=split,
    )
    job = TrainingJob(
        seq_len=2048, global_batch_size=layout.global_batch_size, target=rng.choice(list(Target))
    )
    return PricedLayout(model=model, job=job, cluster=CLUSTER, layout=layout)


def held_by_stage(problem, split):
    """Layers and KiB of every stage as the problem's integers say them."""
    first = 0
    for stage, count in enumerate(split.layers_per_stage):
        kinds = problem.kind_of_layer[first : first + count]
        first += count
        held = problem.held[stage] + sum(problem.holds[stage][kind] for kind in kinds)
        held -= problem.saved[stage] * min(split.recompute_layers, count)
        yield count, held + problem.brought_back[stage] * (count <= split.recompute_layers)


@pytest.mark.parametrize("block", range(4))
def test_scores_are_not_above_the_exact_seconds(block):
    for seed in range(60 * block, 60 * block + 60):
        priced = priced_of(random.Random(seed))  # noqa: S311 - layouts, not secrets
        split = priced.layout
        scored = priced.stage_problem(CLUSTER.usable_memory)
        score = scored.problem.score_of(split.layers_per_stage, split.recompute_layers)
        exact = priced.seconds(split)
        assert 0.3 * exact < scored.seconds(score) <= exact, seed


def test_seconds_of_a_split_are_those_of_an_estimate():
    for seed in range(240, 280):
        priced = priced_of(random.Random(seed))  # noqa: S311 - layouts, not secrets
        split = priced.layout
        time = estimate_time(priced.model, priced.job, CLUSTER, split)
        assert priced.seconds(split) == pytest.approx(time.step_seconds, rel=1e-9), seed


@pytest.mark.parametrize("block", range(2))
def test_room_is_not_above_the_exact_bytes(block):
    for seed in range(60 * block, 60 * block + 60):
        priced = priced_of(random.Random(seed))  # noqa: S311 - layouts, not secrets
        split, problem = priced.layout, priced.stage_problem(CLUSTER.usable_memory).problem
        exact = estimate_memory(priced.model, priced.job, CLUSTER, split).per_rank
        for stage, (count, held) in enumerate(held_by_stage(problem, split)):
            # Where two layers fit with what longer stages meet, shorter ones are not told apart.
            fits_anyway = count < MANY_LAYERS and held <= problem.capacity
            assert fits_anyway or held * KIB <= exact[stage].reserved * (1 + 1e-9), (seed, stage)


@pytest.mark.parametrize("block", range(2))
def test_a_split_that_fits_a_limit_has_room_in_its_problem(block):
    cached = 0
    for seed in range(60 * block, 60 * block + 60):
        rng = random.Random(seed)  # noqa: S311 - layouts, not secrets
        priced = priced_of(rng)
        split = priced.layout
        limit = priced.memory(split).reserved * rng.choice([1 + 1e-9, 1.02, 1.2])
        cached += decisive_fraction(priced.job, CLUSTER, limit) > 0
        problem = priced.stage_problem(limit).problem
        for stage, (_, held) in enumerate(held_by_stage(problem, split)):
            assert held <= problem.capacity, (seed, stage)
    assert cached >= 20  # what the allocator keeps was counted, and did not shut anything out


def test_the_allocators_cache_counts_only_where_a_limit_leaves_it_whole():
    job = TrainingJob(seq_len=2048, global_batch_size=8)
    constants, whole = CLUSTER.profile.calibration, CLUSTER.usable_memory
    share = constants["cached_share_of_room"]
    fraction = decisive_fraction(job, CLUSTER, 0.92 * whole)
    assert fraction == constants["cached_fraction"]
    # Near the card's end the cache gives way, and a demand without it decides.
    assert decisive_fraction(job, CLUSTER, whole) == 0
    for limit in np.linspace(0.5, 1.0, 51) * whole:
        counted = decisive_fraction(job, CLUSTER, limit)
        for demand in np.linspace(0.3, 1.0, 71) * whole:
            for moving in np.linspace(0.0, 1.0, 11) * demand:
                reserved = demand + min(fraction * moving, share * (whole - demand))
                if reserved <= limit:
                    assert demand + counted * moving <= limit * (1 + 1e-12)
                elif counted:
                    assert demand + counted * moving > limit * (1 - 1e-12)


@pytest.mark.parametrize("block", range(2))
def test_bounds_of_tables_leave_a_split_its_own_memory_and_time(block):
    for seed in range(60 * block, 60 * block + 60):
        priced = priced_of(random.Random(seed))  # noqa: S311 - layouts, not secrets
        split, exact = priced.layout, priced.seconds(priced.layout)
        limit = priced.memory(split).reserved * (1 + 1e-9)
        bounds = split_bound(priced.model, priced.job, CLUSTER, table_of([split]), limit=limit)
        redone = np.array([float(split.recompute_layers)])
        below, wanted = np.array([0.3 * exact]), np.array([True])
        bound = bounds.seconds(redone, redone, below, inf, wanted)[0]
        assert bound <= exact, seed
