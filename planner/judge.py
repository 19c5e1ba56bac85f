"""Judge one layout: legal? fits? how fast? The one place where rules and cost models meet.

The verdict rests on the central estimate of reserved memory:

    fits          at most 92 % of what the driver leaves
    at_risk       between that and all of it: it may die
    does_not_fit  more than that, or more host memory than a node has
    illegal       a rule of the target runtime is broken; there is no memory or time to speak of
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from costmodels.hardware import Cluster
from costmodels.job import TrainingJob
from costmodels.layout import Layout
from costmodels.memory.estimate import estimate_memory
from costmodels.model import ModelSpec
from costmodels.terms import MemoryEstimate, TimeEstimate
from costmodels.time.estimate import estimate_time
from costmodels.units import GIB
from planner.rules import Violation, violations

SAFE_FRACTION = 0.92  # chosen: the contract's border between fits and at_risk


class Verdict(StrEnum):
    """What becomes of a layout, best first."""

    FITS = "fits"
    AT_RISK = "at_risk"
    DOES_NOT_FIT = "does_not_fit"
    ILLEGAL = "illegal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A layout with everything the planner says of it; memory and time are None when illegal."""

    layout: Layout
    verdict: Verdict
    violations: tuple[Violation, ...] = ()
    memory: MemoryEstimate | None = None
    time: TimeEstimate | None = None

    @property
    def runs(self) -> bool:
        """Whether somebody may launch it."""
        return self.verdict in (Verdict.FITS, Verdict.AT_RISK)


def judge(model: ModelSpec, job: TrainingJob, cluster: Cluster, layout: Layout) -> Judgement:
    """Judge one layout of a job on a cluster.

    Raises:
        ValueError: The machine's figures give no finite step.

    """
    broken = violations(model, job, cluster, layout)
    if broken:
        return Judgement(layout=layout, verdict=Verdict.ILLEGAL, violations=broken)
    memory = estimate_memory(model, job, cluster, layout)
    shortages = memory_shortages(memory, cluster)
    time = estimate_time(model, job, cluster, layout)
    if not (math.isfinite(time.step_seconds) and time.step_seconds > 0):
        raise ValueError(
            f"the figures of {cluster.profile.name} give a step of {time.step_seconds} s; one of "
            "its rates or latencies is beyond any machine"
        )
    return Judgement(
        layout=layout,
        verdict=memory_verdict(memory, cluster),
        violations=shortages,
        memory=memory,
        time=time,
    )


def memory_verdict(memory: MemoryEstimate, cluster: Cluster) -> Verdict:
    """Return the verdict that follows from memory alone."""
    if memory.host_per_node > cluster.profile.host_memory:
        return Verdict.DOES_NOT_FIT
    share = memory.parts.reserved / memory.capacity
    if share > 1:
        return Verdict.DOES_NOT_FIT
    return Verdict.FITS if share <= SAFE_FRACTION else Verdict.AT_RISK


def memory_shortages(memory: MemoryEstimate, cluster: Cluster) -> tuple[Violation, ...]:
    """Return the memory rules that a legal layout breaks, with the numbers of both sides."""
    found = []
    parts = memory.parts
    if parts.reserved > memory.capacity:
        largest = max(
            ("parameters", "gradients", "optimizer", "activations", "logits", "transient"),
            key=lambda name: getattr(parts, name),
        )
        found.append(
            Violation(
                rule="device_memory",
                message=(
                    f"the fullest GPU (pipeline rank {memory.worst_rank}) needs "
                    f"{parts.reserved / GIB:.1f} GiB of {memory.capacity / GIB:.1f} GiB usable on "
                    f"{cluster.profile.name}; its largest part is {largest} "
                    f"({getattr(parts, largest) / GIB:.1f} GiB)"
                ),
                given={
                    "reserved_gib": parts.reserved / GIB,
                    "worst_stage": memory.worst_rank,
                    "largest_part": largest,
                },
                allowed={"reserved_gib": [memory.capacity / GIB]},
            )
        )
    host = cluster.profile.host_memory
    if memory.host_per_node > host:
        found.append(
            Violation(
                rule="host_memory",
                message=(
                    f"offloaded states need {memory.host_per_node / GIB:.0f} GiB of host memory "
                    f"per node; {cluster.profile.name} nodes have {host / GIB:.0f} GiB "
                    "(--set node.host_memory_gib=N if yours have more)"
                ),
                given={"host_gib_per_node": memory.host_per_node / GIB},
                allowed={"host_gib_per_node": [host / GIB]},
            )
        )
    return tuple(found)
