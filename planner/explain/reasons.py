"""What limits a layout, and in which terms two layouts differ."""

from collections.abc import Iterable
from dataclasses import dataclass

from costmodels.layout import Layout, Offload
from costmodels.terms import TimeEstimate
from costmodels.units import GIB
from planner.judge import Judgement

SECONDS_PER_DAY = 86400
SECONDS_PER_HOUR = 3600
NOTICEABLE = 0.002  # chosen: differences below 0.2 % of a step are not worth a line

# Which kind of limit a term speaks for; communication terms name their axis instead.
_LIMITS = {
    "matmul": "arithmetic",
    "attention": "arithmetic",
    "recompute": "memory (what does not fit is computed again)",
    "memory_bound": "memory bandwidth",
    "loss": "memory bandwidth",
    "launch": "kernel launches",
    "optimizer": "memory bandwidth",
    "bubble": "the pipeline bubble",
    "stragglers": "waiting for the slowest node",
    "offload": "the link to the host",
    "step_overhead": "host work between steps",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Exposed seconds of one term in two layouts."""

    name: str
    axis: str | None
    first: float
    second: float

    @property
    def gain(self) -> float:
        """Seconds that the first layout saves."""
        return self.second - self.first


def limits(time: TimeEstimate, layout: Layout) -> list[tuple[str, float]]:
    """Return what the step of a layout is spent on, by kind of limit, largest share first."""
    named = _LIMITS | (
        {"optimizer": "the optimizer on the host"} if Offload.OPTIMIZER in layout.offload else {}
    )
    shares: dict[str, float] = {}
    for term in time.terms:
        kind = f"{term.axis} communication" if term.axis else named.get(term.name, term.name)
        shares[kind] = shares.get(kind, 0.0) + term.exposed_seconds / time.step_seconds
    return sorted(shares.items(), key=lambda item: (-item[1], item[0]))


def differences(first: TimeEstimate, second: TimeEstimate) -> list[Difference]:
    """Return the terms of two layouts side by side, largest difference first."""
    names = dict.fromkeys((t.name, t.axis) for t in (*first.terms, *second.terms))
    found = [
        Difference(name=name, axis=axis, first=_exposed(first, name), second=_exposed(second, name))
        for name, axis in names
    ]
    return sorted(found, key=lambda difference: (-abs(difference.gain), difference.name))


def _exposed(time: TimeEstimate, name: str) -> float:
    return sum(term.exposed_seconds for term in time.terms if term.name == name)


def why_first(first: Judgement, second: Judgement) -> str:
    """Return in words why one layout is ahead of another."""
    assert first.time is not None
    assert second.time is not None
    step = first.time.step_seconds
    ahead = second.time.step_seconds / step - 1
    noticed = [d for d in differences(first.time, second.time) if abs(d.gain) > NOTICEABLE * step]
    saves = _listed(d for d in noticed if d.gain > 0)
    spends = _listed(d for d in noticed if d.gain < 0)
    words = f"{100 * ahead:.1f} % faster"
    if saves:
        words += f": saves {saves}"
    if spends:
        words += f"; spends {spends} more"
    return words


def _listed(differences: Iterable[Difference]) -> str:
    parts = [f"{abs(d.gain):.3g} s of {_name(d)}" for d in differences]
    return ", ".join(parts[:3])


def _name(difference: Difference) -> str:
    name = difference.name.replace("_", " ")
    return f"{name} ({difference.axis})" if difference.axis else name


def side_by_side(first: Judgement, second: Judgement) -> list[str]:
    """Return time and memory of two layouts, term by term and part by part."""
    assert first.time is not None
    assert second.time is not None
    lines = [f"  {'exposed seconds':<26} {'plan':>10} {'asked':>10}"]
    for difference in differences(first.time, second.time):
        if max(difference.first, difference.second) > NOTICEABLE * first.time.step_seconds:
            name = _name(difference)
            lines.append(f"  {name:<26} {difference.first:>10.4g} {difference.second:>10.4g}")
    steps = (first.time.step_seconds, second.time.step_seconds)
    lines.append(f"  {'step':<26} {steps[0]:>10.4g} {steps[1]:>10.4g}")
    assert first.memory is not None
    assert second.memory is not None
    lines.append(f"  {'GiB of the fullest GPU':<26} {'plan':>10} {'asked':>10}")
    ours, theirs = first.memory.parts, second.memory.parts
    for name in ("parameters", "gradients", "optimizer", "activations", "logits", "transient"):
        pair = (getattr(ours, name) / GIB, getattr(theirs, name) / GIB)
        lines.append(f"  {name:<26} {pair[0]:>10.2f} {pair[1]:>10.2f}")
    lines.append(f"  {'reserved':<26} {ours.reserved / GIB:>10.2f} {theirs.reserved / GIB:>10.2f}")
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """What training on some tokens takes.

    Attributes:
        dollars: None where no price was given.

    """

    tokens: float
    days: float
    gpu_hours: float
    dollars: float | None


def bill(time: TimeEstimate, tokens: float, dollars_per_gpu_hour: float | None = None) -> Bill:
    """Return days, GPU-hours and cost of training on a number of tokens."""
    seconds = tokens / time.tokens * time.step_seconds
    gpu_hours = seconds * time.num_gpus / SECONDS_PER_HOUR
    price = None if dollars_per_gpu_hour is None else gpu_hours * dollars_per_gpu_hour
    return Bill(tokens=tokens, days=seconds / SECONDS_PER_DAY, gpu_hours=gpu_hours, dollars=price)
