"""Speed of one GPU against the number of GPUs, from several plans or from a search over sizes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from planner.plots.style import headline, new_figure, styled

COLOURS = ("#08306b", "#a63603", "#238b45", "#54278f", "#6baed6")
MARKERS = "osD^v"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPoint:
    """The best plan of one size.

    Attributes:
        series: Model and hardware.
        gpus: Total GPUs.
        tokens_per_second_per_gpu: Predicted speed of one GPU.

    """

    series: str
    gpus: int
    tokens_per_second_per_gpu: float


def points_of(estimates: Sequence[object]) -> list[ScalingPoint]:
    """Return the fastest estimate of each series and size.

    Args:
        estimates: The contract's estimate objects.

    Raises:
        ValueError: One lacks its model, hardware or time.

    """
    best: dict[tuple[str, int], float] = {}
    for estimate in estimates:
        try:
            model, hardware, time = (estimate[key] for key in ("model", "hardware", "time"))  # type: ignore[index]
            series = f"{model['name']} on {hardware['name']}"
            gpus = int(hardware["gpus"])
            speed = float(time["tokens_per_second_per_gpu"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"an estimate lacks its model, hardware or time: {error}") from error
        if not (gpus > 0 and 0 < speed < math.inf):
            raise ValueError(f"an estimate says that {gpus} GPUs read {speed} tokens/s each")
        best[series, gpus] = max(best.get((series, gpus), 0.0), speed)
    return [
        ScalingPoint(series=series, gpus=gpus, tokens_per_second_per_gpu=speed)
        for (series, gpus), speed in sorted(best.items())
    ]


@styled
def scaling_figure(points: Sequence[ScalingPoint]) -> Figure:
    """Return tokens/s of one GPU against GPUs, one line per series, labelled at its end.

    Args:
        points: At least one; of each series and size only one.

    """
    figure = new_figure(7.2, 4.2)
    axes = figure.add_subplot()
    names = sorted({point.series for point in points})
    for i, name in enumerate(names):
        own = sorted((p for p in points if p.series == name), key=lambda p: p.gpus)
        colour = COLOURS[i % len(COLOURS)]
        gpus = [p.gpus for p in own]
        speeds = [p.tokens_per_second_per_gpu for p in own]
        axes.axhline(speeds[0], color=colour, linewidth=0.6, linestyle=":")
        axes.plot(gpus, speeds, color=colour, marker=MARKERS[i % len(MARKERS)], fillstyle="none")
        falls = speeds[-1] < speeds[0]  # the label stands on the side that the line leaves free
        axes.annotate(
            f"{name}: {speeds[-1]:,.0f}",
            (gpus[-1], speeds[-1]),
            xytext=(0, -8 if falls else 8),
            textcoords="offset points",
            ha="right",
            va="top" if falls else "bottom",
            color=colour,
        )
    sizes = sorted({point.gpus for point in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(0, 1.15 * max(point.tokens_per_second_per_gpu for point in points))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("GPUs (dotted: the smallest size's speed kept)")
    axes.set_ylabel("predicted tokens/s of one GPU")
    headline(figure, _title(points, names))
    return figure


def _title(points: Sequence[ScalingPoint], names: Sequence[str]) -> str:
    worst = min(names, key=lambda name: _kept(points, name))
    own = sorted((p for p in points if p.series == worst), key=lambda p: p.gpus)
    if len(own) == 1:
        speed = own[0].tokens_per_second_per_gpu
        return f"{worst}: each of {own[0].gpus:,} GPUs reads {speed:,.0f} tokens/s"
    kept = _kept(points, worst)
    verb = f"loses {1 - kept:.0%}" if kept < 1 else f"gains {kept - 1:.0%}"
    which = f"of {worst} " if len(names) > 1 else ""
    return f"From {own[0].gpus:,} to {own[-1].gpus:,} GPUs each GPU {which}{verb} of its tokens/s"


def _kept(points: Sequence[ScalingPoint], name: str) -> float:
    """Return the speed at the largest size over that at the smallest."""
    own = sorted((p for p in points if p.series == name), key=lambda p: p.gpus)
    return own[-1].tokens_per_second_per_gpu / own[0].tokens_per_second_per_gpu
