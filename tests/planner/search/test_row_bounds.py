"""Bounds of partial layouts: the leanest states stand for all that the axes allow."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from random_problems import layouts, problem_of_several_stages, random_problem

from costmodels.job import Target
from costmodels.layout import Recompute
from costmodels.layout_table import RECOMPUTES, table_of
from costmodels.memory.weight_bytes import least_state_bytes
from planner.rules import legal_mask
from planner.search.costs import ModelCosts
from planner.search.priced import layout_of_row
from planner.search.references import References
from planner.search.row_bounds import RowBounds
from planner.search.space import root, space_of, unfold

OFFLOADS = ("offload_optimizer", "offload_parameters", "offload_activations")


def bounds_of(problem):
    space = space_of(problem.model, problem.job, problem.cluster, problem.constraints)
    costs = ModelCosts(model=problem.model, job=problem.job, cluster=problem.cluster)
    limit = costs.capacity
    return RowBounds(space=space, costs=costs, limit=limit, references=References(costs=costs))


@pytest.mark.parametrize("recompute", list(Recompute))
@pytest.mark.parametrize("seed", range(12))
def test_no_states_take_less_memory_than_the_leanest(seed, recompute):
    bounds = bounds_of(random_problem(seed))
    space, costs = bounds.space, bounds.costs
    table = unfold(space, root(space), "stages_per_rank").table
    if not len(table):
        return
    code = np.full(len(table), RECOMPUTES.index(recompute))
    table = replace(table, recompute=code)
    lean = bounds._leanest_states(table)
    least = costs.memory_bound(lean).reshape(-1, len(table)).min(axis=0)
    stages = space.axes.named("zero_stage").values[:, 0].tolist()
    for stage, parts in product(stages, space.axes.named("offload").values.tolist()):
        if parts[1] and stage != 3:  # only cut parameters are offloaded
            continue
        states = {
            name: np.full(len(table), value) for name, value in zip(OFFLOADS, parts, strict=True)
        }
        one = replace(
            table,
            zero_stage=np.full(len(table), stage),
            zero_group=table.data_parallel * table.context_parallel,
            **states,
        )
        assert (costs.memory_bound(one) >= least * (1 - 1e-12)).all(), (stage, parts)


def in_torchtitan(seed):
    """Its split backwards put off what selective recomputation keeps less of."""
    problem = problem_of_several_stages(seed)
    return replace(problem, job=replace(problem.job, target=Target.TORCHTITAN))


@pytest.mark.parametrize("problem_of", [random_problem, in_torchtitan])
@pytest.mark.parametrize("seed", range(12))
def test_the_bound_for_any_recomputation_holds_for_each(problem_of, seed):
    bounds = bounds_of(problem_of(seed))
    space, costs = bounds.space, bounds.costs
    table = unfold(space, root(space), "offload").table
    if not len(table):
        return
    any_of_them = costs.memory_bound(table, any_recompute=True)
    assert (any_of_them <= costs.memory_bound(table) * (1 + 1e-12)).all()


@pytest.mark.parametrize("seed", range(24))
def test_where_states_cannot_be_held_nothing_fits(seed):
    problem = random_problem(seed)
    profile = replace(problem.cluster.profile, host_memory=1)
    cluster = replace(problem.cluster, profile=profile)
    model, job = problem.model, problem.job
    costs = ModelCosts(model=model, job=job, cluster=cluster)
    least = least_state_bytes(model, job) - cluster.num_nodes
    share = least / (cluster.num_gpus * costs.capacity)
    assert costs.may_hold_states(share * (1 + 1e-9))
    assert not costs.may_hold_states(share * (1 - 1e-9))
    tried = list(layouts(replace(problem, cluster=cluster)))
    legal, _ = legal_mask(model, job, cluster, table_of(tried))
    for layout in [one for one, obeys in zip(tried, legal, strict=True) if obeys][::7]:
        memory = costs.memory(layout)
        over = memory.parts.reserved > share * costs.capacity
        assert over or memory.host_per_node > costs.host_capacity, layout


def rows_are_not_below_their_bounds(problem):
    """Compare some rows of several stages; return how many are uneven, and of them near."""
    bounds = bounds_of(problem)
    table = unfold(bounds.space, root(bounds.space), "rank_order").table
    rows = np.flatnonzero(table.stages_per_rank > 1)
    if not len(rows):
        return 0, 0
    table = table.take(rows[np.argsort(-table.lighter_last[rows], kind="stable")][:60])
    least = bounds.costs.memory_bound(table)
    redone = np.where(table.recompute == RECOMPUTES.index(Recompute.FULL), 1.0, 0.0)
    priced = bounds.costs.priced(table, redone)
    fast = bounds.costs.seconds_bound(priced, bounds._limits(table, redone, np.zeros(len(table))))
    near = 0
    for row in range(len(table)):
        layout = layout_of_row(table, row, problem.model.num_layers)
        one = priced.layout(row)
        few = replace(layout, recompute_layers=int(redone[row]))
        assert least[row] <= one.memory(layout).reserved, layout
        assert fast[row] <= one.seconds(few) * (1 + 1e-12), layout
        close = least[row] > 0.8 * one.memory(layout).reserved and fast[row] > 0.8 * one.seconds(
            few
        )
        near += table.lighter_last[row] > 0 and close
    return np.count_nonzero(table.lighter_last), near


def test_no_row_of_several_stages_is_below_its_bounds():
    """Rows name their splits, among them those whose last stage is lighter."""
    found = [rows_are_not_below_their_bounds(problem_of_several_stages(s)) for s in range(16)]
    uneven, near = map(sum, zip(*found, strict=True))
    assert uneven > 50
    assert near > uneven / 4
