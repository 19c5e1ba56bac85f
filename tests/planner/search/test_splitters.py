"""The two solvers of the partition problem: by hand, against each other, against all splits."""

import random
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from costmodels.layout import split_layers
from planner.search.cp_sat import solve
from planner.search.levels import halved
from planner.search.stage_problem import StageProblem

# Six layers on three stages; the first stage also holds work of 4, the last of 6.
EVEN = StageProblem(
    kind_of_layer=(0,) * 6,
    cost=((5,),) * 3,
    base=(4, 0, 6),
    redo_cost=(0,) * 3,
    holds=((10,),) * 3,
    held=(0,) * 3,
    saved=(0,) * 3,
    capacity=100,
    hint=(2, 2, 2),
)
# Two heavy layers behind four light ones.
MIXED = replace(EVEN, kind_of_layer=(0, 0, 0, 0, 1, 1), cost=((5, 10),) * 3, holds=((10, 20),) * 3)
# Recomputing a layer costs 2 and saves 6.
REDONE = replace(
    EVEN, redo_cost=(2,) * 3, saved=(6,) * 3, least_recomputed=1, most_recomputed=4, capacity=14
)


def solvers(problem):
    return [answer for answer in (halved(problem), solve(problem)) if answer is not None]


def test_ends_with_work_of_their_own_get_fewer_layers():
    # Stages of 2, 3, 1 score 14, 15, 11; of 2, 2, 2 the last scores 16.
    assert [(a.layers_per_stage, a.score) for a in solvers(EVEN)] == [((2, 3, 1), 15)] * 2


def test_heavy_layers_count_as_such():
    # 3 * 5 + 4, 5 + 10, 10 + 6; with two light ones in front the middle scores 2 * 5 + 10.
    assert [(a.layers_per_stage, a.score) for a in solvers(MIXED)] == [((3, 2, 1), 19)] * 2


def test_memory_moves_layers_against_the_score():
    tight = replace(EVEN, held=(0, 15, 0), capacity=35)  # the middle has room for two
    assert [a.score for a in solvers(tight)] == [16] * 2


def test_the_fewest_recomputed_layers_that_fit_are_found():
    # Two layers hold 20 - 6 k, so k is 1; the last stage scores 6 + 10 + 2.
    found = solvers(REDONE)
    assert [(a.layers_per_stage, a.recomputed, a.score) for a in found] == [((2, 2, 2), 1, 18)] * 2


def test_nothing_within_the_cutoff_is_said():
    for answer in solvers(replace(EVEN, cutoff=14)):
        assert answer.layers_per_stage == ()
        assert answer.bound == 15


def test_known_splits_do_not_come_back():
    again = replace(EVEN, excluded=((2, 3, 1),))
    assert halved(again) is None  # left to CP-SAT
    assert solve(again).score == 16


@pytest.mark.parametrize("solver", [halved, solve])
def test_fewer_layers_than_stages_are_refused(solver):
    with pytest.raises(ValueError, match="do not fill"):
        solver(replace(EVEN, kind_of_layer=(0, 0)))


def problem_of(seed):
    rng = random.Random(seed)  # noqa: S311 - problems, not secrets
    stages = rng.randint(2, 4)
    layers, kinds = rng.randint(stages, 8), rng.choice([1, 1, 2])
    redoes = rng.random() < 0.5
    holds = tuple(tuple(rng.randint(5, 20) for _ in range(kinds)) for _ in range(stages))
    return StageProblem(
        kind_of_layer=tuple(rng.randrange(kinds) for _ in range(layers)),
        cost=tuple(tuple(rng.randint(5, 30) for _ in range(kinds)) for _ in range(stages)),
        base=tuple(rng.randint(0, 60) for _ in range(stages)),
        redo_cost=(rng.randint(1, 9),) * stages,
        holds=holds,
        held=tuple(rng.randint(0, 40) for _ in range(stages)),
        saved=tuple(rng.randint(0, min(each)) if redoes else 0 for each in holds),
        capacity=rng.randint(30, 200),
        least_recomputed=int(redoes),
        most_recomputed=layers - stages + 1 if redoes else 0,
        hint=split_layers(layers, stages),
        cutoff=rng.choice([None, rng.randint(50, 300)]),
    )


def least_score(problem):
    """The smallest score of all splits that fit, by trying them; None where none does."""
    scores = []
    for inner in combinations(range(1, problem.num_layers), problem.num_stages - 1):
        edges = (0, *inner, problem.num_layers)
        split = tuple(b - a for a, b in pairwise(edges))
        for redone in range(problem.least_recomputed, problem.most_recomputed + 1):
            score = problem.score_of(split, redone)
            if _fits(problem, edges, redone) and score <= (problem.cutoff or score):
                scores.append(score)
    return min(scores, default=None)


def _fits(problem, edges, redone):
    for stage, (first, last) in enumerate(pairwise(edges)):
        held = sum(problem.holds[stage][kind] for kind in problem.kind_of_layer[first:last])
        held += problem.held[stage] - problem.saved[stage] * min(redone, last - first)
        if held > problem.capacity:
            return False
    return True


@pytest.mark.parametrize("block", range(4))
def test_halving_agrees_with_trying_everything(block):
    proved = 0
    for seed in range(100 * block, 100 * block + 100):
        problem = problem_of(seed)
        answer, least = halved(problem), least_score(problem)
        if answer is None:
            continue
        proved += 1
        assert bool(answer.layers_per_stage) == (least is not None), seed
        if least is not None:
            assert answer.score == answer.bound == least, seed
            assert problem.score_of(answer.layers_per_stage, answer.recomputed) == least, seed
    assert proved > 60


def test_cp_sat_agrees_with_trying_everything():
    for seed in range(40):
        answer, least = solve(problem_of(seed)), least_score(problem_of(seed))
        assert (answer.score if answer.layers_per_stage else None) == least, seed
