"""The split of one layout's layers as the solver sees it: integers, and what they mean.

`stage_scores.py` makes the problem from costs; `split_paths.py` names its splits in order, with
`levels.py` for the first of them and `cp_sat.py` for problems too large for tables.
"""

from dataclasses import dataclass
from math import floor, isinf

from costmodels.layout import Schedule

NANOSECONDS = 1e9
Split = tuple[int, ...]
SPLIT_SCHEDULES = (Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProblem:
    """One layout's layers to be cut into stages; every number is an integer.

    Attributes:
        kind_of_layer: Kind of each layer, in model order.
        cost: Per stage, score of one layer of each kind.
        base: Per stage, score of what is no layer (embedding, head, the pipeline's constant).
        redo_cost: Per stage, score of recomputing one layer.
        holds: Per stage, memory of one layer of each kind.
        held: Per stage, memory of what is no layer.
        saved: Per stage, memory that recomputing one layer saves.
        brought_back: Per stage, memory on top where it recomputes all its layers.
        capacity: Memory of a stage.
        least_recomputed: Smallest k; with `most_recomputed` 0 nothing is recomputed.
        most_recomputed: Largest k.
        cutoff: Scores above this are of no interest.
        hint: Layers per stage to start from.
        excluded: Splits that are known already.

    """

    kind_of_layer: tuple[int, ...]
    cost: tuple[tuple[int, ...], ...]
    base: tuple[int, ...]
    redo_cost: tuple[int, ...]
    holds: tuple[tuple[int, ...], ...]
    held: tuple[int, ...]
    saved: tuple[int, ...]
    brought_back: tuple[int, ...]
    capacity: int
    least_recomputed: int = 0
    most_recomputed: int = 0
    cutoff: int | None = None
    hint: tuple[int, ...] = ()
    excluded: tuple[tuple[int, ...], ...] = ()

    @property
    def num_stages(self) -> int:
        """Stages to fill."""
        return len(self.base)

    @property
    def num_layers(self) -> int:
        """Layers to place."""
        return len(self.kind_of_layer)

    def score_of(self, split: tuple[int, ...], recomputed: int) -> int:
        """Return the score of one split with so many recomputed layers per stage."""
        scores, first = [], 0
        for stage, count in enumerate(split):
            kinds = self.kind_of_layer[first : first + count]
            first += count
            redone = self.redo_cost[stage] * min(recomputed, count)
            layers = sum(self.cost[stage][kind] for kind in kinds)
            scores.append(self.base[stage] + layers + redone)
        return max(scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSolution:
    """What the solver found.

    Attributes:
        layers_per_stage: The split; empty when there is none.
        recomputed: Layers that each stage recomputes (k).
        score: Its score.
        bound: No split of the problem scores less; above the cutoff when infeasible.

    """

    layers_per_stage: Split
    recomputed: int
    score: int
    bound: int


def largest_score(problem: StageProblem) -> int:
    """More than any split can score."""
    per_stage = (
        base + problem.num_layers * (max(cost) + redo)
        for base, cost, redo in zip(problem.base, problem.cost, problem.redo_cost, strict=True)
    )
    return max(1, *per_stage, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredProblem:
    """A problem and what its scores mean in seconds.

    Attributes:
        once: Seconds per step besides the pipeline, at their least.
        stretch: Factor on everything.

    """

    problem: StageProblem
    once: float
    stretch: float

    def seconds(self, score: int) -> float:
        """Return the step that no split of this score goes below."""
        return (score / NANOSECONDS + self.once) * self.stretch

    def score(self, seconds: float) -> int | None:
        """Return the largest score whose step may be at most this, None where any may be."""
        if isinf(seconds):
            return None
        return max(0, floor((seconds / self.stretch - self.once) * NANOSECONDS))
