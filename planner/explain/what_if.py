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
from costmodels.profile_toml import profile_from_toml, profile_value
from costmodels.profile_writer import profile_to_toml
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """What a change does.

    Attributes:
        before: The plan's layout as things are.
        after: The same layout after the change; illegal where it no longer works out.
        best: The best layout after the change, None where nothing fits.
        threshold: The value from which on `best` is ahead of the plan's layout, None where the
            plan's layout stays the best or no value in between decides it.

    """

    key: str
    old: float
    new: float
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
        found = _size_threshold if key in JOB_KEYS else _threshold
        threshold = found(plan, best.layout, old, new, inputs_at)
    return Changed(
        key=key, old=old, new=new, before=before, after=after, best=best, threshold=threshold
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


def _threshold(
    plan: Plan, best: Layout, old: float, new: float, inputs_at: Callable[[str], Inputs]
) -> float | None:
    def is_ahead(value: float) -> bool:
        job, cluster = inputs_at(f"{value:.9g}")
        ours = judge(plan.model, job, cluster, plan.layout)
        theirs = judge(plan.model, job, cluster, best)
        if not (ours.runs and theirs.runs):
            return theirs.runs
        assert ours.time is not None
        assert theirs.time is not None
        return theirs.time.step_seconds < ours.time.step_seconds

    if is_ahead(old) or not is_ahead(new):
        return None
    behind, ahead = old, new
    for _ in range(MOST_HALVINGS):
        middle = (behind + ahead) / 2
        behind, ahead = (behind, middle) if is_ahead(middle) else (middle, ahead)
    return ahead


def _size_threshold(
    plan: Plan, best: Layout, old: float, new: float, inputs_at: Callable[[str], Inputs]
) -> float | None:
    """Return the first of some sizes, from the present one on, at which `best` is ahead.

    Sizes of a job are whole numbers that both layouts have to divide, so they are tried one by one.
    """
    unit = lcm(*(one.data_parallel * one.micro_batch_size for one in (plan.layout, best)))
    unit = lcm(unit, *(sequence_multiple(one) for one in (plan.layout, best)))
    steps = (old + (new - old) * share / SIZES_TRIED for share in range(1, SIZES_TRIED))
    sizes = dict.fromkeys(round(step / unit) * unit for step in steps)
    low, high = sorted((old, new))
    for size in (*(size for size in sizes if low < size < high), int(new)):
        job, cluster = inputs_at(str(size))
        ours, theirs = (
            judge(plan.model, job, cluster, refitted(one, job, cluster))
            for one in (plan.layout, best)
        )
        if theirs.time is None or not theirs.runs:
            continue
        if not ours.runs or ours.time is None or theirs.time.step_seconds < ours.time.step_seconds:
            return float(size)
    return None


def _count(key: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--what-if {key}={text}: a whole number of at least 1")
    return int(text)
