"""What a search says when its work is limited: a plan, and how far it may be from the best."""

import pytest
from random_problems import random_problem

from planner.search import explore
from planner.search.ranking import search

SEEDS = range(4, 12)


def searched(seed):
    problem = random_problem(seed)
    return search(
        problem.model, problem.job, problem.cluster, problem.constraints, top=4, only_fitting=True
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_limited_search_finds_a_plan_where_one_fits_and_claims_no_more(monkeypatch, seed):
    whole = searched(seed)
    monkeypatch.setattr(explore, "MOST_SOLVED", 1)
    monkeypatch.setattr(explore, "MOST_SETTLING", 0)
    limited = searched(seed)
    assert bool(limited.plans) == bool(whole.plans)
    if not whole.plans:
        assert limited.status == "infeasible"
        return
    best, found = (result.plans[0].time.step_seconds for result in (whole, limited))
    assert limited.bound_seconds <= best * (1 + 1e-9)
    assert found >= best * (1 - 1e-9)
    if limited.status == "optimal":
        assert found == pytest.approx(best, rel=1e-9)
    else:
        assert limited.gap > 0
