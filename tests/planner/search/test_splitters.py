"""The solvers of the partition problem: by hand, against each other, against all splits."""

import random
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from costmodels.layout import split_layers
from planner.search import split_paths
from planner.search.cp_sat import solve
from planner.search.levels import Halving
from planner.search.split_paths import ascending_splits
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
    brought_back=(0,) * 3,
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
    first = next(ascending_splits(problem), None)
    return [answer for answer in (first, solve(problem)) if answer is not None]


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
    low = replace(EVEN, cutoff=14)
    assert list(ascending_splits(low)) == []
    assert solve(low).layers_per_stage == ()
    assert solve(low).bound == 15


def test_known_splits_do_not_come_back():
    assert solve(replace(EVEN, excluded=((2, 3, 1),))).score == 16
    named = [(a.score, a.layers_per_stage) for a in ascending_splits(replace(EVEN, cutoff=16))]
    assert named == [(15, (2, 3, 1)), (16, (2, 2, 2)), (16, (1, 3, 2))]


@pytest.mark.parametrize("solver", [lambda problem: next(ascending_splits(problem)), solve])
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
        brought_back=tuple(rng.randint(0, min(each) + 2) if redoes else 0 for each in holds),
        capacity=rng.randint(30, 200),
        least_recomputed=int(redoes),
        most_recomputed=layers - stages + 1 if redoes else 0,
        hint=split_layers(layers, stages),
        cutoff=rng.choice([None, rng.randint(50, 300)]),
    )


def scores_of_all(problem):
    """The smallest score of every split that fits, by trying them: ascending pairs."""
    scores = []
    for inner in combinations(range(1, problem.num_layers), problem.num_stages - 1):
        edges = (0, *inner, problem.num_layers)
        split = tuple(b - a for a, b in pairwise(edges))
        counts = range(problem.least_recomputed, problem.most_recomputed + 1)
        fitting = [
            problem.score_of(split, redone) for redone in counts if _fits(problem, edges, redone)
        ]
        least = min(fitting, default=None)
        if least is not None and least <= (problem.cutoff or least):
            scores.append((least, split))
    return sorted(scores)


def least_score(problem):
    """The smallest score of all splits that fit; None where none does."""
    return next((score for score, _ in scores_of_all(problem)), None)


def _fits(problem, edges, redone):
    for stage, (first, last) in enumerate(pairwise(edges)):
        held = sum(problem.holds[stage][kind] for kind in problem.kind_of_layer[first:last])
        held += problem.held[stage] - problem.saved[stage] * min(redone, last - first)
        held += problem.brought_back[stage] * (last - first <= redone)
        if held > problem.capacity:
            return False
    return True


@pytest.mark.parametrize("block", range(4))
def test_halving_agrees_with_trying_everything(block):
    proved = 0
    for seed in range(100 * block, 100 * block + 100):
        problem = problem_of(seed)
        halving, least = Halving.of(problem), least_score(problem)
        answer = halving.lightest()
        if not len(halving.counts):  # no number of recomputed layers is within the cutoff
            assert (answer, least) == (None, None), seed
        elif answer is not None:
            assert answer.score == answer.bound == least, seed
            assert problem.score_of(answer.layers_per_stage, answer.recomputed) == least, seed
        proved += answer is not None or not len(halving.counts)
    assert proved > 60


@pytest.mark.parametrize("block", range(4))
def test_no_number_of_recomputed_layers_scores_below_what_halving_says(block):
    for seed in range(100 * block, 100 * block + 100):
        problem = problem_of(seed)
        halving = Halving.of(problem)
        known = dict(zip(halving.counts.tolist(), halving.least.tolist(), strict=True))
        for count in range(problem.least_recomputed, problem.most_recomputed + 1):
            one = replace(problem, least_recomputed=count, most_recomputed=count)
            least = least_score(one)
            assert least is None or (count in known and known[count] <= least), (seed, count)


def any_loads_of(seed):
    """A problem whose loads may fall with one more layer, which halving says nothing of."""
    problem = problem_of(seed)
    return replace(problem, saved=tuple(2 * one + 3 for one in problem.saved))


@pytest.mark.parametrize("make", [problem_of, any_loads_of])
@pytest.mark.parametrize("block", range(4))
def test_every_split_is_named_once_by_ascending_score(make, block):
    """Trying all splits gives the same pairs of score and split, whatever the order of equals."""
    for seed in range(100 * block, 100 * block + 100):
        problem = make(seed)
        named = list(ascending_splits(problem))
        pairs = [(answer.score, answer.layers_per_stage) for answer in named]
        assert [score for score, _ in pairs] == sorted(score for score, _ in pairs), seed
        assert sorted(pairs) == scores_of_all(problem), seed
        for answer in named:
            score = problem.score_of(answer.layers_per_stage, answer.recomputed)
            assert answer.bound == answer.score == score, seed


def test_problems_too_large_for_tables_are_left_to_cp_sat(monkeypatch):
    monkeypatch.setattr(split_paths, "MOST_STEPS", 0)
    for seed in range(8):
        problem = replace(problem_of(seed), cutoff=120)
        scores = [answer.score for answer in ascending_splits(problem)]
        assert scores == [score for score, _ in scores_of_all(problem)], seed


def test_cp_sat_agrees_with_trying_everything():
    for seed in range(40):
        answer, least = solve(problem_of(seed)), least_score(problem_of(seed))
        assert (answer.score if answer.layers_per_stage else None) == least, seed
