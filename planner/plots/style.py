"""How figures look, and how they are written: one colour per cause everywhere, same bytes each run.

Colours go from dark (useful work) to light (waiting), so that they stay apart in grey; whatever
moves data is warm and hatched, whatever computes is cold and plain. Labels stand at what they name;
a legend only where there are more than five things to tell apart.
"""

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from planner.files import write_bytes

FORMATS = ("svg", "png", "pdf")

# The font ships with matplotlib; the salt makes SVG ids the same in every run.
_RC: dict[Any, Any] = {  # matplotlib types the keys as one long list of literals
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "meshwright",
    "svg.fonttype": "path",
    # Names come from files of strangers: a dollar sign is a dollar sign.
    "text.parse_math": False,
}
_CHARACTERS_PER_INCH = 11.5  # of the title's font, measured generously
_PANEL_CHARACTERS = 88  # chosen: what the axes of a ten-inch page hold
_DPI = 150  # chosen: PNG figures stay readable on a dense screen
# No clock and no host in the file. Keys that a format does not know would be refused.
_METADATA = {
    "svg": {"Date": None, "Creator": "meshwright"},
    "png": {"Software": "meshwright"},
    "pdf": {"CreationDate": None, "Creator": "meshwright", "Producer": "meshwright"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How one cause is drawn and what it is called.

    Attributes:
        label: Words for readers.
        colour: Fill.
        hatch: Pattern over the fill; "" for none.

    """

    label: str
    colour: str
    hatch: str = ""


TERMS: dict[str, Look] = {
    "matmul": Look(label="matrix products", colour="#08306b"),
    "attention": Look(label="attention", colour="#2171b5"),
    "memory_bound": Look(label="memory-bound operations", colour="#6baed6"),
    "loss": Look(label="loss", colour="#9ecae1"),
    "launch": Look(label="kernel launches", colour="#c6dbef"),
    "recompute": Look(label="recomputation", colour="#54278f"),
    "optimizer": Look(label="optimizer", colour="#238b45"),
    "tp_collectives": Look(label="tensor parallel", colour="#a63603", hatch="////"),
    "cp_attention": Look(label="context parallel", colour="#d94801", hatch="////"),
    "ep_dispatch": Look(label="expert dispatch", colour="#f16913", hatch="////"),
    "p2p": Look(label="pipeline transfers", colour="#fd8d3c", hatch="////"),
    "zero3_gather": Look(label="ZeRO-3 gathers", colour="#c9781c", hatch="\\\\\\\\"),
    "grad_reduce": Look(label="gradient reduction", colour="#e6a817", hatch="\\\\\\\\"),
    "param_gather": Look(label="parameter gathers", colour="#f5d271", hatch="\\\\\\\\"),
    "offload": Look(label="host transfers", colour="#b8860b", hatch="xxxx"),
    "bubble": Look(label="pipeline bubble", colour="#e8e8e8", hatch="...."),
    "step_overhead": Look(label="step overhead", colour="#bdbdbd"),
    "stragglers": Look(label="stragglers", colour="#d9d9d9"),
}

PARTS: dict[str, Look] = {
    "parameters": Look(label="parameters", colour="#08306b"),
    "gradients": Look(label="gradients", colour="#2171b5"),
    "optimizer": Look(label="optimizer", colour="#238b45"),
    "activations": Look(label="activations", colour="#fd8d3c"),
    "logits": Look(label="logits", colour="#a63603"),
    "transient": Look(label="transient", colour="#fdd0a2"),
    "communication": Look(label="NCCL", colour="#bdbdbd", hatch="////"),
    "framework": Look(label="framework", colour="#e8e8e8", hatch="...."),
}

# Where a legend stands: outside on the right, whatever the height of the axes.
BESIDE: dict[str, Any] = {
    "loc": "center left",
    "bbox_to_anchor": (1.0, 0.5),
    "frameon": False,
    "handlelength": 1.2,
}

_OTHER_COLOUR = "#969696"

# Predicted is hollow, measured solid, in every figure.
PREDICTED: dict[str, Any] = {"facecolors": "none", "edgecolors": "#a63603", "linewidths": 1.1}
MEASURED: dict[str, Any] = {"color": "#08306b", "linewidths": 0}


def look_of(name: str, looks: dict[str, Look]) -> Look:
    """Return how a cause is drawn; one that has no look yet is grey, under its own name."""
    return looks.get(name) or Look(label=name.replace("_", " "), colour=_OTHER_COLOUR)


def is_dark(colour: str) -> bool:
    """Whether white text reads better than black on a colour (Rec. 709 luma under one half)."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.5  # noqa: PLR2004 - half of white


# Decorates every function that draws: texts take their settings when they are made.
styled = mpl.rc_context(_RC)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, sizes in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def headline(figure: Figure, text: str) -> None:
    """State a figure's finding above it, from its left edge, in as many lines as it takes."""
    width = int(figure.get_figwidth() * _CHARACTERS_PER_INCH)
    figure.suptitle(textwrap.fill(text, width), x=0.01, ha="left", fontsize=10.5, fontweight="bold")


def panel_title(axes: Axes, text: str) -> None:
    """State a panel's finding above its axes."""
    axes.set_title(textwrap.fill(text, _PANEL_CHARACTERS), pad=14)


def quiet_rows(axes: Axes, labels: list[str], places: Sequence[float] | None = None) -> None:
    """Label horizontal rows from top to bottom (0, 1, ... or given places), without ticks."""
    axes.set_yticks(range(len(labels)) if places is None else places, labels)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def render(figure: Figure, file_format: str) -> bytes:
    """Return a figure as the bytes of a file; the same figure gives the same bytes.

    Raises:
        ValueError: A format that is not offered.

    """
    if file_format not in FORMATS:
        raise ValueError(f"cannot draw {file_format or 'a file without suffix'!r}: use {FORMATS}")
    buffer = io.BytesIO()
    with mpl.rc_context(_RC):
        figure.savefig(buffer, format=file_format, dpi=_DPI, metadata=_METADATA[file_format])
    return buffer.getvalue()


def write_figure(figure: Figure, path: Path) -> None:
    """Write a figure atomically in the format of the path's suffix.

    Raises:
        ValueError: An unknown suffix, or the file cannot be written.

    """
    write_bytes(path, render(figure, path.suffix.removeprefix(".").lower()))
