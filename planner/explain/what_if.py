"""Another machine or job: what the best plan becomes, and from which value on it changes.

    links.inter_node.gb_per_s=100     a key of the profile, in the profile's units
    seq_len=32768                     a size of the job, likewise global_batch_size
    gpus=128                          another cluster

The search runs again with the new value. Where another layout wins, the value from which on it is
ahead of the plan's is found by halving the interval between the old value and the new one (sizes
of the job are tried in steps); that holds for these two layouts, a third may win in between.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

from costmodels.hardware import Cluster, make_cluster
from costmodels.job import TrainingJob
from costmodels.layout import Layout
from costmodels.model import ModelSpec
from costmodels.profiles.reader import profile_from_toml, profile_value
from costmodels.profiles.writer import profile_to_toml
from planner.constraints import FREE, applicable
from planner.explain.margins import refitted
from planner.judge import Judgement, judge
from planner.plan import Plan
from planner.rules.rule import sequence_multiple
from planner.search.ranking import search

JOB_KEYS = ("seq_len", "global_batch_size")
GPUS = "gpus"
SIZES_TRIED = 16  # chosen: sizes of a job between the present one and the asked one
MOST_HALVINGS = 20  # chosen: to a millionth of the interval
DIGITS = 9  # chosen: of a figure that is tried, as plan files round theirs


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """What a change does.

    Attributes:
        job: The job after the change.
        cluster: The machine after the change.
        before: The plan's layout as things are.
        after: The same layout after the change; illegal where it no longer works out.
        best: The best layout after the change, None where nothing fits.
        threshold: The value from which on `best` is ahead of the plan's layout, None where the
            plan's layout stays the best, where `best` is ahead already as things are, and where no
            value in between decides it.

    """

    key: str
    old: float
    new: float
    job: TrainingJob
    cluster: Cluster
    before: Judgement
    after: Judgement
    best: Judgement | None
    threshold: float | None


Inputs = tuple[TrainingJob, Cluster]


def what_if(plan: Plan, change: str) -> Changed:
    """Plan again under a change.

    Args:
        plan: As things are.
        change: KEY=VALUE.

    Raises:
        ValueError: The key is unknown or the value makes no sense.

    """
    key, equals, text = change.partition("=")
    if not equals:
        raise ValueError(f"--what-if {change}: write KEY=VALUE")
    key, text = key.strip(), text.strip()
    old, inputs_at = _axis(plan, key, text)
    job, cluster = inputs_at(text)
    constraints = applicable(FREE, job.target, plan.model)
    result = search(plan.model, job, cluster, constraints, top=1)
    best = result.plans[0] if result.plans else None
    before = judge(plan.model, plan.job, plan.cluster, plan.layout)
    after = judge(plan.model, job, cluster, refitted(plan.layout, job, cluster))
    new = float(text)
    moved = best is not None and best.layout != after.layout
    threshold = None
    if moved and best is not None and key != GPUS:
        theirs = best.layout

        def is_ahead_at(value: str) -> bool:
            return is_ahead(plan.model, inputs_at(value), theirs, plan.layout)

        if key in JOB_KEYS:
            unit = _size_unit(plan.layout, theirs)
            threshold = _size_threshold(old, new, unit, is_ahead_at)
        else:
            threshold = _threshold(old, new, is_ahead_at)
    return Changed(
        key=key,
        old=old,
        new=new,
        job=job,
        cluster=cluster,
        before=before,
        after=after,
        best=best,
        threshold=threshold,
    )


def _axis(plan: Plan, key: str, text: str) -> tuple[float, Callable[[str], Inputs]]:
    """Return the present value of a key, and the inputs at another value of it."""
    if key in JOB_KEYS:
        _count(key, text)

        def at_size(value: str) -> Inputs:
            size: dict[str, Any] = {key: int(value)}
            return replace(plan.job, **size), plan.cluster

        return float(getattr(plan.job, key)), at_size
    profile = plan.cluster.profile
    if key == GPUS:
        gpus = _count(key, text)
        return float(plan.cluster.num_gpus), lambda _: (
            plan.job,
            make_cluster(profile, gpus, plan.cluster.gpus_per_node),
        )
    toml = profile_to_toml(profile)

    def at_figure(value: str) -> Inputs:
        changed = profile_from_toml(toml, "--what-if", (f"{key}={value}",))
        return plan.job, replace(plan.cluster, profile=changed)

    at_figure(text)  # names the known keys where this one is not
    return profile_value(toml, key), at_figure


def is_ahead(model: ModelSpec, inputs: Inputs, theirs: Layout, ours: Layout) -> bool:
    """Whether a layout runs faster than ours, or runs where ours does not.

    Data parallel and micro-batches of both are derived again.
    """
    first, second = (judge(model, *inputs, refitted(one, *inputs)) for one in (theirs, ours))
    if not (first.runs and second.runs):
        return first.runs
    assert first.time is not None
    assert second.time is not None
    return first.time.step_seconds < second.time.step_seconds


def _threshold(old: float, new: float, is_ahead_at: Callable[[str], bool]) -> float | None:
    """Return the figure that parts where `best` is behind from where it is ahead."""

    def ahead(value: float) -> bool:
        return is_ahead_at(f"{value:.{DIGITS}g}")

    if ahead(old) or not ahead(new):
        return None
    low, high = old, new  # behind at low, ahead at high
    for _ in range(MOST_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if ahead(middle) else (middle, high)
    return high


def _size_threshold(
    old: float, new: float, unit: int, is_ahead_at: Callable[[str], bool]
) -> float | None:
    """Return the first of some sizes, from the present one on, at which `best` is ahead.

    Sizes of a job are whole numbers that both layouts have to divide, so they are tried one by one.
    """
    if is_ahead_at(str(int(old))):
        return None
    steps = (old + (new - old) * share / SIZES_TRIED for share in range(1, SIZES_TRIED))
    sizes = dict.fromkeys(round(step / unit) * unit for step in steps)
    low, high = sorted((old, new))
    tried = (*(size for size in sizes if low < size < high), int(new))
    return next((float(size) for size in tried if is_ahead_at(str(size))), None)


def _size_unit(*layouts: Layout) -> int:
    """Return what sizes of a job are multiples of, for all of some layouts."""
    unit = lcm(*(one.data_parallel * one.micro_batch_size for one in layouts))
    return lcm(unit, *(sequence_multiple(one) for one in layouts))


def _count(key: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--what-if {key}={text}: a whole number of at least 1")
    return int(text)
