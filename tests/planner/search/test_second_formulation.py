"""The search against one CP-SAT model in which the layout itself is a variable.

The solver picks the degrees, the micro-batch, every choice and the layers of every stage at once:

    tp * pp * cp * dp = GPUs        dp * mbs * m = batch        layers over all stages = the model's
    bytes of the fullest rank <= limit        minimise nanoseconds

Bytes and nanoseconds of a point are columns of a table that the cost models fill; the search's
bounds, order and partition problem have no part in it.
"""

from dataclasses import replace

import pytest
from ortools.sat.python import cp_model
from random_problems import cuts, even, layouts, random_problem, seconds

from costmodels.estimate import estimate_time
from costmodels.layout import Recompute, Schedule
from costmodels.layout_table import table_of
from costmodels.memory import estimate_memory
from planner.judge import SAFE_FRACTION
from planner.rules import legal_mask
from planner.search.ranking import search

NANOSECONDS = 10**9
KIB = 1024
MOST_POINTS = 4000  # of one problem; larger ones are left to the brute-force twin
MOST_STAGES = 24


def points_of(problem):
    """Every legal layout with every split and number of recomputed layers."""
    layers = problem.model.num_layers
    inputs = (problem.model, problem.job, problem.cluster)
    tried = list(layouts(problem))
    legal, _ = legal_mask(*inputs, table_of(tried))
    for plain in (plain for plain, obeys in zip(tried, legal, strict=True) if obeys):
        stages = plain.num_stages
        free = plain.stages_per_rank == 1 and plain.pipeline_parallel > 1
        for split in cuts(layers, stages) if free else (even(layers, stages),):
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
    """Seconds of the optimum; None where nothing fits; nothing at all for a problem too large."""
    rows = []
    for layout in points_of(problem):
        rows.append(row_of(problem, layout))
        if len(rows) > MOST_POINTS:
            pytest.skip("more points than one model is meant for")
    if not rows:
        return None
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


def agree(seed):
    problem = random_problem(seed)
    expected = fastest(problem)
    found = search(
        problem.model, problem.job, problem.cluster, problem.constraints, top=1, only_fitting=True
    )
    got = [seconds(said) for said in found.plans]
    assert got == pytest.approx([] if expected is None else [expected], rel=1e-8, abs=2e-9)


@pytest.mark.parametrize("seed", range(6))
def test_one_model_with_the_layout_as_a_variable_agrees(seed):
    agree(seed)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(5000, 5100))
def test_one_model_with_the_layout_as_a_variable_agrees_on_more(seed):
    agree(seed)
