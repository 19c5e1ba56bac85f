"""The search against a twin that tries every layout, every split and every recomputed layer."""

import pytest
from random_problems import answers, problem_of_several_stages, random_problem, seconds

from planner.search.ranking import search

TOP = 4


def agree(seed, problem_of=random_problem):
    """Compare; return whether anything fits."""
    problem = problem_of(seed)
    expected = sorted(seconds(said) for said in answers(problem).values())[:TOP]
    found = search(
        problem.model, problem.job, problem.cluster, problem.constraints, top=TOP, only_fitting=True
    )
    got = [seconds(said) for said in found.plans]
    assert got == pytest.approx(expected, rel=1e-9), seed
    assert found.status == ("optimal" if expected else "infeasible"), seed
    if expected:
        assert found.bound_seconds <= expected[0] * (1 + 1e-9)
    return bool(expected)


@pytest.mark.parametrize("block", range(10))
def test_search_agrees_with_trying_everything(block):
    fitting = [agree(seed) for seed in range(20 * block, 20 * block + 20)]
    assert any(fitting)


@pytest.mark.parametrize("block", range(2))
def test_several_stages_per_rank_agree_with_trying_everything(block):
    seeds = range(20 * block, 20 * block + 20)
    fitting = [agree(seed, problem_of_several_stages) for seed in seeds]
    assert any(fitting)


def test_of_equal_scores_the_fewest_recomputed_layers_are_taken():
    """A stage that does not pace the pipeline may redo one layer or two for the same score."""
    assert agree(1300)


def test_what_fits_by_selective_recomputation_alone_is_found():
    """One stage of three layers: kept whole they do not fit, and none may be redone in full."""
    assert agree(1308)


@pytest.mark.matrix
@pytest.mark.parametrize("block", range(100))
def test_search_agrees_with_trying_everything_on_2000_problems(block):
    for seed in range(1000 + 20 * block, 1020 + 20 * block):
        agree(seed, problem_of_several_stages if seed % 5 == 0 else random_problem)
