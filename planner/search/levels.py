"""The split with the smallest score by halving: exact where loads only grow with layers.

A score S leaves every stage room for so many layers; S is enough exactly when stages that are
filled from the front, each as far as S and memory allow, reach the last layer. All numbers of
recomputed layers are halved at once. What this needs is that one more layer never makes a stage
lighter; where rounding breaks that, or where single layers of one kind stand in the way, nothing
is claimed, and tables (`split_paths.py`) prove the split.
"""

from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from planner.search.stage_problem import Split, StageProblem, StageSolution, largest_score

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Halving:
    """The smallest score at each number of recomputed layers.

    Attributes:
        problem: What is split.
        filled: Its prefix sums; None where loads do not only grow.
        counts: Numbers of recomputed layers with which some split may score within the cutoff.
        least: Scores that no split goes below with each of them.

    """

    problem: StageProblem
    filled: "_Filled | None"
    counts: Ints
    least: Ints

    @classmethod
    def of(cls, problem: StageProblem) -> "Halving":
        """Halve for all numbers at once; where loads do not only grow, nothing is known.

        Raises:
            ValueError: There are fewer layers than stages.

        """
        if problem.num_layers < problem.num_stages:
            raise ValueError(f"{problem.num_layers} layers do not fill {problem.num_stages} stages")
        counts = np.arange(problem.least_recomputed, problem.most_recomputed + 1)
        above = largest_score(problem) if problem.cutoff is None else problem.cutoff
        if not _only_grows(problem):
            none = np.zeros_like(counts)
            return cls(problem=problem, filled=None, counts=counts, least=none)
        filled = _Filled.of(problem)
        counts = counts[filled.reach(counts, np.full(len(counts), above))]
        least = _least_levels(filled, counts, above) if len(counts) else counts
        return cls(problem=problem, filled=filled, counts=counts, least=least)

    def lightest(self) -> StageSolution | None:
        """Return a split with the smallest score of all; None where there is none, or no proof."""
        problem = self.problem
        if self.filled is None or not len(self.counts):
            return None
        best = int(np.argmin(self.least))  # of equal scores the fewest recomputed layers
        score, recomputed = int(self.least[best]), int(self.counts[best])
        split = self.filled.split(score, recomputed)
        if not _holds(problem, split, recomputed, score):
            return None
        return StageSolution(
            layers_per_stage=split, recomputed=recomputed, score=score, bound=score
        )


def _least_levels(filled: "_Filled", counts: Ints, above: int) -> Ints:
    """Return the smallest score at which all layers are reached, for each number recomputed."""
    low = np.full(len(counts), min(filled.problem.base) - 1)
    high = np.full(len(counts), above)
    while (high - low > 1).any():
        middle = (low + high) // 2
        enough = filled.reach(counts, middle)
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return high


def _only_grows(problem: StageProblem) -> bool:
    stages = zip(problem.cost, problem.holds, problem.saved, problem.brought_back, strict=True)
    redo = problem.most_recomputed > 0
    return all(
        min(cost) >= 0 and min(holds) >= redo * max(saved, brought_back)
        for cost, holds, saved, brought_back in stages
    )


def _holds(problem: StageProblem, split: Split, recomputed: int, score: int) -> bool:
    """Whether a split is one of the problem's, with a score."""
    if not split or min(split) < 1 or problem.score_of(split, recomputed) > score:
        return False
    first = 0
    for stage, count in enumerate(split):
        kinds = problem.kind_of_layer[first : first + count]
        first += count
        held = problem.held[stage] + sum(problem.holds[stage][kind] for kind in kinds)
        held += problem.brought_back[stage] * (0 < count <= recomputed)
        if held - problem.saved[stage] * min(recomputed, count) > problem.capacity:
            return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filled:
    """A problem with prefix sums: what the first layers cost and hold on each stage.

    Attributes:
        cost: [stages, layers + 1].
        holds: The same of memory.

    """

    problem: StageProblem
    cost: Ints
    holds: Ints

    @classmethod
    def of(cls, problem: StageProblem) -> "_Filled":
        kinds = np.array(problem.kind_of_layer)

        def prefix(per_stage: tuple[tuple[int, ...], ...]) -> Ints:
            each = np.array(per_stage, dtype=np.int64)[:, kinds]
            return np.concatenate(
                [np.zeros((len(each), 1), dtype=np.int64), each.cumsum(axis=1)], 1
            )

        return cls(problem=problem, cost=prefix(problem.cost), holds=prefix(problem.holds))

    @property
    def is_uniform(self) -> bool:
        """Whether all layers are of one kind."""
        return len(set(self.problem.kind_of_layer)) == 1

    def reach(self, recomputed: Ints, score: Ints) -> NDArray[np.bool_]:
        """Whether stages of so many recomputed layers hold all layers without scoring more."""
        if self.is_uniform:
            room = self.room(recomputed, score)
            enough: NDArray[np.bool_] = (room.min(axis=1) >= 1) & (
                room.sum(axis=1) >= self.problem.num_layers
            )
            return enough
        edges = self.edges(recomputed, score)
        reached: NDArray[np.bool_] = edges[-1] >= self.problem.num_layers
        return reached

    def room(self, recomputed: Ints, score: Ints) -> Ints:
        """Return layers that each stage takes at most, of one kind: [numbers, stages]."""
        problem = self.problem
        k = recomputed[:, None]
        cost, holds = self.cost[:, 1], self.holds[:, 1]
        redo, saved = np.array(problem.redo_cost), np.array(problem.saved)
        most = problem.num_layers
        left = score[:, None] - np.array(problem.base)
        free = problem.capacity - np.array(problem.held)[None, :]
        in_time = np.where(left >= k * (cost + redo), _over(left - k * redo, cost, most), 0)
        in_time = np.maximum(in_time, np.minimum(_over(left, cost + redo, most), k))
        fits = _over(free + k * saved, holds, most)
        fits = np.where(fits > k, fits, 0)  # else it recomputes all
        free = free - np.array(problem.brought_back) * (k > 0)
        fits = np.maximum(fits, np.minimum(_over(free, holds - saved, most), k))
        room: Ints = np.minimum(np.minimum(in_time, fits), most)
        return room

    def edges(self, recomputed: Ints, score: Ints) -> Ints:
        """Return how far stages reach when filled from the front: [stages + 1, numbers]."""
        at = np.zeros(len(recomputed), dtype=np.int64)
        edges = [at]
        for stage in range(self.problem.num_stages):
            end = np.minimum(
                self._end(
                    self.cost[stage],
                    at,
                    score - self.problem.base[stage],
                    recomputed,
                    extra=self.problem.redo_cost[stage],
                ),
                self._end(
                    self.holds[stage],
                    at,
                    self.problem.capacity - self.problem.held[stage],
                    recomputed,
                    extra=-self.problem.saved[stage],
                    all_extra=self.problem.brought_back[stage],
                ),
            )
            # Later stages need a layer each. A stage may seem to take none here, so that this
            # never reaches less far than a split does.
            end = np.minimum(end, self.problem.num_layers - self.problem.num_stages + stage + 1)
            at = np.maximum(end, at)
            edges.append(at)
        return np.array(edges)

    @staticmethod
    def _end(
        prefix: Ints,
        at: Ints,
        room: Ints | int,
        recomputed: Ints,
        *,
        extra: int,
        all_extra: int = 0,
    ) -> Ints:
        """Return the last edge up to which layers from `at` stay within a room.

        `extra` comes on top for each of the first `recomputed` layers, `all_extra` where there are
        no more layers than those.
        """
        base = prefix[at]
        left = base + extra * at + room - all_extra * (recomputed > 0)
        every = np.searchsorted(prefix + extra * np.arange(len(prefix)), left, "right") - 1
        some = np.searchsorted(prefix, base + room - extra * recomputed, "right") - 1
        end: Ints = np.where(some > at + recomputed, some, np.minimum(every, at + recomputed))
        return end

    def split(self, score: int, recomputed: int) -> Split:
        """Return a split within a score: the lightest where all layers are of one kind."""
        one, level = np.array([recomputed]), np.array([score])
        if self.is_uniform:
            return self._levelled(self.room(one, level)[0].tolist(), recomputed)
        latest = self.edges(one, level)[:, 0].tolist()
        if latest[-1] < self.problem.num_layers:
            return ()
        even = [0, *accumulate(self.problem.hint)] if self.problem.hint else latest
        near = [min(e, edge) for e, edge in zip(even, latest, strict=True)]
        for edges in (near, [*latest[:-1], self.problem.num_layers]):
            split = tuple(b - a for a, b in pairwise(edges))
            if _holds(self.problem, split, recomputed, score):
                return split
        return ()

    def _levelled(self, room: list[int], recomputed: int) -> Split:
        """Give each layer to the stage that scores least with it."""
        problem = self.problem
        counts = [1] * problem.num_stages

        def with_one_more(stage: int) -> tuple[float, int]:
            count = counts[stage] + 1
            if count > room[stage]:
                return float("inf"), stage
            redone = problem.redo_cost[stage] * min(recomputed, count)
            cost = problem.cost[stage][problem.kind_of_layer[0]]
            return problem.base[stage] + count * cost + redone, stage

        waiting = [with_one_more(stage) for stage in range(problem.num_stages)]
        heapify(waiting)
        for _ in range(problem.num_layers - problem.num_stages):
            _, stage = waiting[0]
            counts[stage] += 1
            heapreplace(waiting, with_one_more(stage))
        return tuple(counts)


def _over(room: Ints, each: Ints, most: int) -> Ints:
    """Return how many of something fit a room; all where it takes none."""
    fits = room // np.maximum(each, 1)
    result: Ints = np.where(room < 0, 0, np.where(each > 0, fits, most))
    return result
