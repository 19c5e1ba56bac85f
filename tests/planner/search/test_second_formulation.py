"""The search against one CP-SAT model in which the layout itself is a variable.

The solver picks the degrees, the micro-batch, every choice and the layers of every stage at once:

    tp * pp * cp * dp = GPUs        dp * mbs * m = batch        layers over all stages = the model's
    bytes of the fullest rank <= limit        minimise nanoseconds

Bytes and nanoseconds of a point are columns of a table that the cost models fill; the search's
bounds, order and partition problem have no part in it.
"""

from dataclasses import replace
from itertools import islice

import pytest
from ortools.sat.python import cp_model
from random_problems import layouts, random_problem, seconds, splits_of

from costmodels.layout import Recompute, Schedule
from costmodels.layout_table import table_of
from costmodels.memory.estimate import estimate_memory
from costmodels.time.estimate import estimate_time
from planner.judge import SAFE_FRACTION, Verdict, memory_verdict
from planner.rules import legal_mask
from planner.search.ranking import search

NANOSECONDS = 10**9
KIB = 1024
# Points of one problem: with fewer little is chosen; larger ones are left to the brute-force twin.
LEAST_POINTS, MOST_POINTS = 50, 4000
SEEDS = 50  # that a problem is drawn from; every third is of that size
MOST_STAGES = 24


def points_of(problem):
    """Every legal layout with every split and number of recomputed layers."""
    inputs = (problem.model, problem.job, problem.cluster)
    tried = list(layouts(problem))
    legal, _ = legal_mask(*inputs, table_of(tried))
    for plain in (plain for plain, obeys in zip(tried, legal, strict=True) if obeys):
        for split in splits_of(problem, plain):
            counts = range(max(split)) if plain.recompute is Recompute.FULL else (0,)
            for count in counts:
                yield replace(plain, layers_per_stage=split, recompute_layers=count)


def row_of(problem, layout):
    """The point as integers: choices, layers per stage, KiB, GiB of the host, nanoseconds."""
    inputs = (problem.model, problem.job, problem.cluster)
    memory = estimate_memory(*inputs, layout)
    time = estimate_time(*inputs, layout)
    padded = (*layout.layers_per_stage, *(0,) * (MOST_STAGES - layout.num_stages))
    return (
        layout.tensor_parallel,
        layout.pipeline_parallel,
        layout.context_parallel,
        layout.data_parallel,
        layout.micro_batch_size,
        layout.num_micro_batches,
        list(Schedule).index(layout.schedule),
        layout.zero_stage,
        *padded,
        -int(-memory.parts.reserved // KIB),
        int(memory.host_per_node <= problem.cluster.profile.host_memory),
        round(time.step_seconds * NANOSECONDS),
    )


def fastest(problem):
    """Seconds of the optimum; None where nothing fits."""
    rows = [row_of(problem, layout) for layout in points_of(problem)]
    model = cp_model.CpModel()
    columns = list(zip(*rows, strict=True))
    variables = [
        model.new_int_var(min(column), max(column), f"column{place}")
        for place, column in enumerate(columns)
    ]
    tp, pp, cp, dp, mbs, m, *_ = variables
    stages, (kib, host, nanoseconds) = variables[8:-3], variables[-3:]
    gpus = problem.cluster.num_gpus
    inner, outer, batch = (model.new_int_var(1, 10**6, name) for name in ("tp_cp", "rest", "batch"))
    model.add_multiplication_equality(inner, [tp, cp])
    model.add_multiplication_equality(outer, [pp, dp])
    model.add_multiplication_equality(gpus, [inner, outer])
    model.add_multiplication_equality(batch, [dp, mbs])
    model.add_multiplication_equality(problem.job.global_batch_size, [batch, m])
    model.add(sum(stages) == problem.model.num_layers)
    model.add_allowed_assignments(variables, rows)
    memory = estimate_memory(problem.model, problem.job, problem.cluster, next(points_of(problem)))
    model.add(kib <= int(SAFE_FRACTION * memory.capacity // KIB))
    model.add(host == 1)
    model.minimize(nanoseconds)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None
    assert status == cp_model.OPTIMAL
    return solver.objective_value / NANOSECONDS


def drawn(first_seed):
    """The problems of some seeds whose points are neither few nor too many for one model."""
    for seed in range(first_seed, first_seed + SEEDS):
        problem = random_problem(seed)
        counted = sum(1 for _ in islice(points_of(problem), MOST_POINTS + 1))
        if LEAST_POINTS <= counted <= MOST_POINTS:
            yield problem


def fits(problem, layout):
    memory = estimate_memory(problem.model, problem.job, problem.cluster, layout)
    return memory_verdict(memory, problem.cluster) is Verdict.FITS


def feasible(first_seed):
    """The first problem of some seeds on which a layout fits."""
    return next(p for p in drawn(first_seed) if any(fits(p, one) for one in points_of(p)))


def infeasible(first_seed):
    """The first problem of some seeds on which none does."""
    return next(p for p in drawn(first_seed) if not any(fits(p, one) for one in points_of(p)))


def agree(problem):
    expected = fastest(problem)
    found = search(
        problem.model, problem.job, problem.cluster, problem.constraints, top=1, only_fitting=True
    )
    got = [seconds(said) for said in found.plans]
    assert got == pytest.approx([] if expected is None else [expected], rel=1e-8, abs=2e-9)
    return expected


@pytest.mark.parametrize("first_seed", range(0, 6 * SEEDS, SEEDS))
def test_one_model_with_the_layout_as_a_variable_agrees(first_seed):
    assert agree(feasible(first_seed)) is not None


def test_one_model_with_the_layout_as_a_variable_agrees_that_nothing_fits():
    assert agree(infeasible(0)) is None


@pytest.mark.matrix
@pytest.mark.parametrize("first_seed", range(10000, 10000 + 100 * SEEDS, SEEDS))
def test_one_model_with_the_layout_as_a_variable_agrees_on_more(first_seed):
    agree(next(drawn(first_seed)))
