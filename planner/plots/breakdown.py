"""Where a step's seconds and a rank's bytes go."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from costmodels.terms import MemoryEstimate, Term
from costmodels.units import GIB
from planner.contract import PARTS as PART_NAMES
from planner.contract import parts_gib
from planner.judge import SAFE_FRACTION
from planner.plots.style import (
    BESIDE,
    PARTS,
    TERMS,
    headline,
    is_dark,
    look_of,
    new_figure,
    quiet_rows,
    styled,
)

MIN_LABELLED = 0.045  # chosen: narrower segments, as a share of the axis, cannot hold a number
MAX_RANKS = 16  # chosen: more rows are no longer read; the fullest and its neighbours are kept
TINY = 0.002  # chosen: terms under this share of the step only crowd the figure
ROUNDING = 1e-6  # seconds under this share of the step are rounding of a difference

# The card's lines pass behind numbers.
_ON_WHITE: dict[str, Any] = {
    "va": "center",
    "bbox": {"facecolor": "white", "linewidth": 0, "pad": 1.0},
}


@styled
def time_figure(terms: Sequence[Term]) -> Figure:
    """Return bars of a step's terms: solid what the step waits for, hollow what is hidden.

    Args:
        terms: Seconds of one step; exposed seconds sum to the step.

    """
    figure = new_figure(7.2, 1.3 + 0.27 * len(_shown(terms)))
    headline(figure, draw_time(figure.add_subplot(), terms))
    return figure


def draw_time(axes: Axes, terms: Sequence[Term]) -> str:
    """Draw `time_figure` on given axes and return its finding."""
    step = sum(term.exposed_seconds for term in terms)
    shown = _shown(terms)
    for row, term in enumerate(shown):
        look = look_of(term.name, TERMS)
        exposed = term.exposed_seconds if term.exposed_seconds > ROUNDING * step else 0.0
        hidden = max(term.seconds - exposed, 0.0)
        axes.barh(row, exposed, color=look.colour, hatch=look.hatch, edgecolor="white", linewidth=0)
        words = f" {format_seconds(exposed)}  {exposed / step:.1%}"
        if hidden > TINY * step:
            axes.barh(row, hidden, left=exposed, fill=False, edgecolor=look.colour, linestyle=":")
            words += f"  (+{format_seconds(hidden)} hidden)"
        axes.text(exposed + hidden, row, words, va="center")
    quiet_rows(axes, [look_of(term.name, TERMS).label for term in shown])
    longest = max(max(term.seconds, term.exposed_seconds) for term in shown)
    axes.set_xlim(0, 1.32 * longest)
    axes.set_xlabel("seconds of one step (solid: waited for; dotted: hidden behind other work)")
    return _time_title(terms, step)


def _shown(terms: Sequence[Term]) -> list[Term]:
    """Return the terms worth a bar, in the order of the colours."""
    step = sum(term.exposed_seconds for term in terms)
    order = {name: i for i, name in enumerate(TERMS)}
    shown = [t for t in terms if max(t.seconds, t.exposed_seconds) > TINY * step] or list(terms)
    return sorted(shown, key=lambda term: (order.get(term.name, len(order)), term.name))


def _time_title(terms: Sequence[Term], step: float) -> str:
    largest = max(terms, key=lambda term: term.exposed_seconds)
    exposed = sum(term.exposed_seconds for term in terms if term.axis is not None)
    return (
        f"{look_of(largest.name, TERMS).label.capitalize()} take "
        f"{largest.exposed_seconds / step:.0%} of the {format_seconds(step)} step, "
        f"waiting for communication {max(exposed, 0.0) / step:.0%}"
    )


@styled
def memory_figure(memory: MemoryEstimate) -> Figure:
    """Return stacked bars of every pipeline rank's memory by part, against the card's."""
    figure = new_figure(7.2, 1.9 + 0.32 * min(len(memory.per_rank), MAX_RANKS))
    headline(figure, draw_memory(figure.add_subplot(), memory))
    return figure


def draw_memory(axes: Axes, memory: MemoryEstimate) -> str:
    """Draw `memory_figure` on given axes and return its finding."""
    capacity = memory.capacity / GIB
    ranks = _ranks_drawn(len(memory.per_rank), memory.worst_rank)
    right = 1.12 * max(capacity, *(memory.per_rank[rank].reserved / GIB for rank in ranks))
    for row, rank in enumerate(ranks):
        total = _stack(axes, row, parts_gib(memory.per_rank[rank]), right)
        axes.text(total + right / 150, row, f"{total:.1f}", fontweight="bold", **_ON_WHITE)
    for share, style, words in ((1.0, "-", "card"), (SAFE_FRACTION, "--", f"{SAFE_FRACTION:.0%}")):
        axes.axvline(share * capacity, color="black", linewidth=0.9, linestyle=style)
        axes.text(share * capacity, -0.62, words, ha="center", fontsize=8)
    quiet_rows(axes, [f"rank {rank}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.5, -0.6)
    axes.set_xlim(0, right)
    axes.set_xlabel("GiB of one GPU at its fullest moment")
    _part_legend(axes, memory)
    return _memory_title(memory)


def _stack(axes: Axes, row: int, parts: Mapping[str, float], right: float) -> float:
    """Draw one rank's parts end to end and return where they end, in GiB."""
    left = 0.0
    for name, look in PARTS.items():
        width = parts[name]
        axes.barh(
            row,
            width,
            left=left,
            color=look.colour,
            hatch=look.hatch,
            edgecolor="white",
            linewidth=0.4,
        )
        if width > MIN_LABELLED * right:
            axes.text(
                left + width / 2,
                row,
                f"{width:.1f}",
                ha="center",
                va="center",
                color="white" if is_dark(look.colour) else "black",
                fontsize=8,
                bbox={"facecolor": look.colour, "linewidth": 0, "pad": 1.0},
            )
        left += width
    return left


def _ranks_drawn(count: int, worst: int) -> list[int]:
    """Return the ranks to draw: all, or evenly spread ones with the ends and the fullest."""
    if count <= MAX_RANKS:
        return list(range(count))
    spread = {round(i * (count - 1) / (MAX_RANKS - 2)) for i in range(MAX_RANKS - 1)}
    return sorted(spread | {worst})


def _memory_title(memory: MemoryEstimate) -> str:
    parts = parts_gib(memory.parts)
    largest = max(PART_NAMES, key=lambda name: parts[name])
    reserved, capacity = memory.parts.reserved / GIB, memory.capacity / GIB
    who = (
        "Every rank takes"
        if len(memory.per_rank) == 1
        else (f"Pipeline rank {memory.worst_rank} is fullest:")
    )
    return (
        f"{who} {reserved:.1f} of {capacity:.1f} GiB, most of it {PARTS[largest].label} "
        f"({parts[largest]:.1f})"
    )


def _part_legend(axes: Axes, memory: MemoryEstimate) -> None:
    used = [name for name in PARTS if any(getattr(rank, name) > 0 for rank in memory.per_rank)]
    handles = [
        Patch(
            facecolor=PARTS[n].colour, hatch=PARTS[n].hatch, edgecolor="white", label=PARTS[n].label
        )
        for n in used
    ]
    axes.legend(handles=handles, **BESIDE)


def format_seconds(seconds: float) -> str:
    """Return seconds with three figures and a unit that keeps them short."""
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"  # noqa: PLR2004 - a millisecond
