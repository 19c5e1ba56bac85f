"""Which figure of the machine moves the step most.

The derivative is that of the whole estimate, simulation and overlap included, taken as a central
difference; a formula's own derivative (see `formulas`) cannot see that a link hides behind work.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from costmodels.hardware import Cluster, HardwareProfile
from costmodels.time.estimate import estimate_time
from planner.plan import Plan

STEP = 0.05  # chosen: half of the 10 % that the words speak of, to either side


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """What changing one figure does.

    Attributes:
        key: The figure's key in a profile.
        gain: Relative speed-up when the figure is 10 % better.

    """

    key: str
    gain: float


def sensitivities(plan: Plan) -> list[Sensitivity]:
    """Return the figures of the plan's machine, most important first."""
    found = [Sensitivity(key=key, gain=_gain(plan, scaled)) for key, scaled in _FIGURES.items()]
    return sorted(found, key=lambda sensitivity: (-sensitivity.gain, sensitivity.key))


def _gain(plan: Plan, scaled: Callable[[HardwareProfile, float], HardwareProfile]) -> float:
    def seconds(factor: float) -> float:
        cluster = replace(plan.cluster, profile=scaled(plan.cluster.profile, factor))
        return _step_seconds(plan, cluster)

    return seconds(1 - STEP) / seconds(1 + STEP) - 1


def _step_seconds(plan: Plan, cluster: Cluster) -> float:
    return estimate_time(plan.model, plan.job, cluster, plan.layout).step_seconds


def _peak(profile: HardwareProfile, factor: float) -> HardwareProfile:
    peaks = tuple((name, value * factor) for name, value in profile.device.peak_flops)
    return replace(profile, device=replace(profile.device, peak_flops=peaks))


def _memory_bandwidth(profile: HardwareProfile, factor: float) -> HardwareProfile:
    bandwidth = profile.device.memory_bandwidth * factor
    return replace(profile, device=replace(profile.device, memory_bandwidth=bandwidth))


def _host(profile: HardwareProfile, factor: float) -> HardwareProfile:
    bandwidth = profile.device.host_bandwidth * factor
    return replace(profile, device=replace(profile.device, host_bandwidth=bandwidth))


def _intra_node(profile: HardwareProfile, factor: float) -> HardwareProfile:
    link = profile.intra_node
    return replace(profile, intra_node=replace(link, bandwidth=link.bandwidth * factor))


def _inter_node(profile: HardwareProfile, factor: float) -> HardwareProfile:
    link = profile.inter_node
    return replace(profile, inter_node=replace(link, bandwidth=link.bandwidth * factor))


def _latency(profile: HardwareProfile, factor: float) -> HardwareProfile:
    inner, outer = profile.intra_node, profile.inter_node
    return replace(
        profile,
        intra_node=replace(inner, latency=inner.latency / factor),
        inter_node=replace(outer, latency=outer.latency / factor),
    )


_FIGURES: dict[str, Callable[[HardwareProfile, float], HardwareProfile]] = {
    "device.peak_tflops": _peak,
    "device.memory_gb_per_s": _memory_bandwidth,
    "device.host_gb_per_s": _host,
    "links.intra_node.gb_per_s": _intra_node,
    "links.inter_node.gb_per_s": _inter_node,
    "links.*.latency_us": _latency,
}
