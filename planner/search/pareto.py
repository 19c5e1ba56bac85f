"""Pareto fronts: points that no other one beats or equals in both of two things.

A front of time against memory is the fastest plan under ever smaller shares of the card.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from costmodels.hardware import Cluster
from costmodels.job import TrainingJob
from costmodels.model import ModelSpec
from planner.constraints import Constraints
from planner.judge import Judgement
from planner.search.ranking import search, share_allowed

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPoint:
    """A plan that nothing beats in both.

    Attributes:
        seconds: Step time.
        reserved: Bytes of the fullest rank.

    """

    judgement: Judgement
    seconds: float
    reserved: float

    @property
    def capacity(self) -> float:
        """Bytes that the card has."""
        assert self.judgement.memory is not None
        return self.judgement.memory.capacity


def non_dominated(
    points: Iterable[T], first: Callable[[T], float], second: Callable[[T], float]
) -> tuple[T, ...]:
    """Return the points that no other one beats or equals in both; ascending in the first."""
    front: list[T] = []
    for point in sorted(points, key=lambda p: (first(p), second(p))):
        if not front or second(point) < second(front[-1]):
            front.append(point)
    return tuple(front)


def memory_front(
    model: ModelSpec,
    job: TrainingJob,
    cluster: Cluster,
    constraints: Constraints,
    *,
    best: Judgement,
    steps: int,
    shrink: float,
) -> tuple[FrontPoint, ...]:
    """Return time against memory: each point is the fastest plan below the memory before it.

    Args:
        model: The network.
        job: What is trained.
        cluster: The machine.
        constraints: What the user fixed.
        best: The fastest plan under these, from a search; where it takes more memory than they
            allow (nothing fits) the front is empty.
        steps: Points at most; each after the first is a search.
        shrink: Share of a point's memory that the next one may take.

    """
    points = [_point(best)]
    if points[0].reserved > share_allowed(constraints) * points[0].capacity:
        return ()
    while len(points) < steps:
        share = shrink * points[-1].reserved / points[-1].capacity
        limited = replace(constraints, max_memory_fraction=share)
        found = search(model, job, cluster, limited, top=1, only_fitting=True)
        if not found.plans:
            break
        points.append(_point(found.plans[0]))
    return non_dominated(points, lambda p: p.seconds, lambda p: p.reserved)


def _point(plan: Judgement) -> FrontPoint:
    assert plan.time is not None
    assert plan.memory is not None
    return FrontPoint(
        judgement=plan, seconds=plan.time.step_seconds, reserved=plan.memory.parts.reserved
    )
