"""Pareto fronts: what more memory, or more GPUs, buys in time.

A front over memory is the fastest plan under ever smaller shares of the card; over GPUs it is a
sweep of counts. Points that another one beats in both are left out.
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
from planner.search.sizing import Sized

MEMORY_STEPS = 8  # chosen: points of a front are read by people
SHRINK = 0.95  # chosen: a step of memory that is worth asking about
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
    steps: int = MEMORY_STEPS,
    shrink: float = SHRINK,
) -> tuple[FrontPoint, ...]:
    """Return time against memory: each point is the fastest plan below the memory before it.

    Args:
        model: The network.
        job: What is trained.
        cluster: The machine.
        constraints: What the user fixed.
        steps: Points at most; each is a search.
        shrink: Share of a point's memory that the next one may take.

    """
    points: list[FrontPoint] = []
    share = share_allowed(constraints)
    for _ in range(steps):
        limited = replace(constraints, max_memory_fraction=share)
        found = search(model, job, cluster, limited, top=1, only_fitting=True)
        if not found.plans:
            break
        best = found.plans[0]
        assert best.time is not None
        assert best.memory is not None
        reserved = best.memory.parts.reserved
        points.append(FrontPoint(judgement=best, seconds=best.time.step_seconds, reserved=reserved))
        share = shrink * reserved / best.memory.capacity
    return non_dominated(points, lambda p: p.seconds, lambda p: p.reserved)


def gpu_front(sizes: Iterable[Sized]) -> tuple[Sized, ...]:
    """Return the counts of GPUs whose best plan is faster than that of every smaller count."""
    fitting = [size for size in sizes if size.result.plans]
    return non_dominated(fitting, lambda s: s.num_gpus, _seconds)


def _seconds(size: Sized) -> float:
    time = size.result.plans[0].time
    assert time is not None
    return time.step_seconds
