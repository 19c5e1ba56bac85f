"""Every split of one layout's layers by ascending score: paths through the edges between layers.

A split is a path: stage s takes the layers from edge e_s to edge e_(s+1), 0 = e_0 < ... < e_S = L.
A step of it scores what its stage does (never, where memory does not hold it), a path what its
highest step does. For one number of recomputed layers let

    ahead[s, a]    lowest score of a path from the start to edge a before stage s
    behind[s, b]   lowest score of a path from edge b before stage s to the end

Then max(ahead, step, behind) is the lowest score of a path with a step, every score that some split
has is that of one of its steps, and a walk that keeps to steps and to `behind` below a level comes
to an end whatever it chooses. This holds for any loads; halving (`levels.py`) says first which
numbers of recomputed layers are worth a table, and names the lightest split. Problems too large for
tables are left to CP-SAT (`cp_sat.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from planner.search.levels import Halving
from planner.search.stage_problem import Split, StageProblem, StageSolution

Ints = NDArray[np.int64]

MOST_STEPS = 4_000_000  # chosen: 32 MB each table; 299 layers stay below however they are cut
_NEVER = np.iinfo(np.int64).max
_NOTHING = np.iinfo(np.int64).min


def ascending_splits(problem: StageProblem) -> Iterator[StageSolution]:
    """Yield the splits of a problem by ascending score, each once, none above the cutoff.

    Each comes with the number of recomputed layers with which it scores least, and with its score
    as the bound of all that follow.

    Args:
        problem: Without excluded splits.

    Raises:
        ValueError: There are fewer layers than stages.
        RuntimeError: CP-SAT, where a problem is left to it, does not end.

    """
    halving = Halving.of(problem)
    lightest = halving.lightest()
    named: set[Split] = set()
    if lightest is not None:
        named.add(lightest.layers_per_stage)
        yield lightest
    if _num_steps(problem) > MOST_STEPS:
        yield from _by_cp_sat(problem, named)
        return
    sums = _Sums.of(problem)
    scores = np.maximum(halving.least, _first_news(problem, halving.counts)).tolist()
    # What a number of recomputed layers names next; at first a score below all, and no split.
    waiting: list[tuple[int, int, Iterator[tuple[int, Split]], Split]] = [
        (score, recomputed, _paths(sums, recomputed, score - 1), ())
        for score, recomputed in zip(scores, halving.counts.tolist(), strict=True)
    ]
    heapify(waiting)
    while waiting:
        score, recomputed, paths, split = heappop(waiting)
        if split and split not in named:
            named.add(split)
            yield StageSolution(
                layers_per_stage=split, recomputed=recomputed, score=score, bound=score
            )
        following = next(paths, None)
        if following is not None:
            heappush(waiting, (following[0], recomputed, paths, following[1]))


def _num_steps(problem: StageProblem) -> int:
    places = problem.num_layers - problem.num_stages + 1
    return problem.num_stages * places * places


def _first_news(problem: StageProblem, recomputed: Ints) -> Ints:
    """Return what splits score at least that each number of recomputed layers adds: [numbers].

    Where every stage is shorter than k, recomputing k layers is recomputing k - 1: a split that k
    adds has a stage of k layers. Most numbers add nothing within reach, and get no table.
    """
    if min(map(min, (*problem.cost, *problem.holds))) < 0 or min(problem.redo_cost) < 0:
        return np.zeros_like(recomputed)  # loads may fall with one more layer
    k = recomputed[:, None]
    cost, holds = ([min(kinds) for kinds in of] for of in (problem.cost, problem.holds))
    score = np.array(problem.base) + k * np.add(cost, problem.redo_cost)
    held = np.array(problem.held) + k * np.subtract(holds, problem.saved)
    # A longer stage keeps one layer instead.
    held += np.minimum(problem.brought_back, holds)
    least = np.where(held <= problem.capacity, score, _NEVER).min(axis=1)
    news: Ints = np.where(recomputed > problem.least_recomputed, least, 0)
    return news


def _by_cp_sat(problem: StageProblem, named: set[Split]) -> Iterator[StageSolution]:
    from planner.search.cp_sat import solve  # noqa: PLC0415 - half a second that others save

    while True:
        answer = solve(replace(problem, excluded=tuple(sorted(named))))
        if not answer.layers_per_stage:
            return
        named.add(answer.layers_per_stage)
        yield answer


def _paths(sums: "_Sums", recomputed: int, above: int) -> Iterator[tuple[int, Split]]:
    """Yield splits that score above a level, ascending, at one number of recomputed layers."""
    cutoff = sums.problem.cutoff
    if above >= (_NEVER - 1 if cutoff is None else cutoff):
        return
    tables = _Tables.of(sums, recomputed)
    level = tables.next_level(above)
    while level <= (_NEVER - 1 if cutoff is None else cutoff):
        for split in tables.walk(level):
            yield level, split
        level = tables.next_level(level)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tables:
    """Scores at one number of recomputed layers.

    Before stage s lie s layers at least, and behind it stages that need a layer each: its first
    edge is s + i and its last one s + 1 + j, for i and j below the same number of places.

    Attributes:
        step: Of stages: [stages, i, j].
        behind: Lowest of all that follows: [stages + 1, i].
        best: Lowest of a split with a step: [stages, i, j].
        even: Place of each stage's last edge in the split that a walk stays close to.

    """

    step: Ints
    behind: Ints
    best: Ints
    even: tuple[int, ...]

    @classmethod
    def of(cls, sums: "_Sums", recomputed: int) -> "_Tables":
        """Follow all paths at one number of recomputed layers."""
        step, hint = sums.steps(recomputed), sums.problem.hint
        stages, places, _ = step.shape
        ahead = np.full((stages, places), _NEVER)
        ahead[0, 0] = _NOTHING
        for stage in range(stages - 1):
            reached = np.maximum(ahead[stage][:, None], step[stage])
            ahead[stage + 1] = reached.min(axis=0)
        behind = np.full((stages + 1, places), _NEVER)
        behind[stages, places - 1] = _NOTHING
        for stage in reversed(range(stages)):
            behind[stage] = np.maximum(step[stage], behind[stage + 1]).min(axis=1)
        edges = accumulate(hint) if hint else (0,) * stages
        return cls(
            step=step,
            behind=behind,
            best=np.maximum(np.maximum(ahead[:, :, None], step), behind[1:, None, :]),
            even=tuple(edge - stage for stage, edge in enumerate(edges, start=1)),
        )

    def next_level(self, level: int) -> int:
        """Return the smallest score of a split above a level; _NEVER where there is none."""
        above = self.best[self.best > level]
        return int(above.min(initial=_NEVER))

    def walk(self, level: int) -> Iterator[Split]:
        """Yield the splits that score a level, those close to the even one first."""

        def onwards(stage: int, at: int, highest: int) -> Iterator[Split]:
            if stage == len(self.step):
                if highest == level:
                    yield ()
                return
            scores = self.step[stage, at]
            ends = np.flatnonzero(np.maximum(scores, self.behind[stage + 1]) <= level)
            for end in sorted(ends.tolist(), key=lambda end: abs(end - self.even[stage])):
                for rest in onwards(stage + 1, end, max(highest, int(scores[end]))):
                    yield end - at + 1, *rest

        yield from onwards(0, 0, _NOTHING)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sums:
    """What every stage scores and holds between every two edges where nothing is recomputed.

    Attributes:
        score: [stages, i, j], edges as in `_Tables`.
        held: The same of memory.
        length: Layers between two edges, of which some are less than one: [i, j].

    """

    problem: StageProblem
    score: Ints
    held: Ints
    length: Ints

    @classmethod
    def of(cls, problem: StageProblem) -> "_Sums":
        """Sum up each stage's layers."""
        stages = problem.num_stages
        places = problem.num_layers - stages + 1
        first = np.arange(stages)[:, None] + np.arange(places)
        kinds = np.array(problem.kind_of_layer)

        def between(per_stage: tuple[tuple[int, ...], ...], base: tuple[int, ...]) -> Ints:
            each = np.array(per_stage, dtype=np.int64)[:, kinds]
            prefix = np.concatenate([np.zeros((stages, 1), dtype=np.int64), each.cumsum(axis=1)], 1)
            before = np.take_along_axis(prefix, first, axis=1) - np.array(base)[:, None]
            after = np.take_along_axis(prefix, first + 1, axis=1)
            sums: Ints = after[:, None, :] - before[:, :, None]
            return sums

        return cls(
            problem=problem,
            score=between(problem.cost, problem.base),
            held=between(problem.holds, problem.held),
            length=np.arange(places)[None, :] - np.arange(places)[:, None] + 1,
        )

    def steps(self, recomputed: int) -> Ints:
        """Return the score of every stage between every two edges; _NEVER where none may lie."""
        problem = self.problem
        redone = np.minimum(recomputed, self.length)
        score, held = self.score, self.held
        if recomputed:
            score = score + np.array(problem.redo_cost)[:, None, None] * redone
            held = held - np.array(problem.saved)[:, None, None] * redone
            every = self.length <= recomputed
            held += np.array(problem.brought_back)[:, None, None] * every
        step: Ints = np.where((self.length >= 1) & (held <= problem.capacity), score, _NEVER)
        return step
