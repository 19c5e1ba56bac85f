"""Predicted against measured: one row per run, or one dot per row of a table, by GPU generation."""

from collections.abc import Sequence
from statistics import mean, median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from planner.measured.runs import MeasuredRow, MeasuredRun, kendall_tau
from planner.plots.breakdown import format_seconds
from planner.plots.style import MEASURED, PREDICTED, headline, new_figure, quiet_rows, styled

# Chosen: a band holds its name, grows with its runs, and one sweep does not fill the page.
LEAST_BAND, PER_RUN, MOST_BAND = 1.0, 0.06, 5.0
INCHES_PER_BAND = 0.21
MARGIN = 0.1  # share of a band that stays empty at either end


@styled
def runs_figure(runs: Sequence[MeasuredRun]) -> Figure:
    """Return step times of run folders: solid measured with its quartiles, hollow predicted.

    Args:
        runs: At least one.

    """
    figure = new_figure(8.4, 1.4 + 0.26 * len(runs))
    axes = figure.add_subplot()
    ordered = sorted(runs, key=lambda run: (run.measured, run.label))
    for row, run in enumerate(ordered):
        axes.plot([run.predicted, run.measured], [row, row], color="#969696", linewidth=0.8)
        axes.plot(run.spread, [row, row], color="#08306b", linewidth=3, solid_capstyle="butt")
        axes.text(
            max(run.predicted, run.measured, run.spread[1]),
            row,
            f"   {run.error:+.0%}",
            va="center",
        )
    rows = range(len(ordered))
    axes.scatter([run.measured for run in ordered], rows, zorder=3, s=26, **MEASURED)
    axes.scatter([run.predicted for run in ordered], rows, zorder=3, s=34, **PREDICTED)
    quiet_rows(axes, [run.label for run in ordered])
    axes.set_ylim(len(ordered) - 0.4, -0.9)
    axes.set_xlim(0, 1.15 * max(max(run.predicted, run.spread[1]) for run in ordered))
    axes.set_xlabel("seconds per step (solid: measured median and quartiles; hollow: predicted)")
    headline(figure, _runs_title(ordered))
    return figure


def _runs_title(runs: Sequence[MeasuredRun]) -> str:
    error = mean(abs(run.error) for run in runs)
    if len(runs) == 1:
        (run,) = runs
        return (
            f"Predicted {format_seconds(run.predicted)}, measured {format_seconds(run.measured)}: "
            f"{run.error:+.0%}"
        )
    tau = kendall_tau([(run.predicted, run.measured) for run in runs])
    return (
        f"Step times of {len(runs)} layouts are predicted {error:.0%} off on average, "
        f"{(1 + tau) / 2:.0%} of pairs are in the right order"
    )


@styled
def table_figure(rows: Sequence[MeasuredRow], generation: str) -> Figure:
    """Return speeds of a table's rows on one GPU generation, one band per family, worst first.

    Args:
        rows: At least one.
        generation: For the title.

    """
    families = _families(rows)
    heights = [min(LEAST_BAND + PER_RUN * len(members), MOST_BAND) for _, members in families]
    figure = new_figure(9.0, 1.3 + INCHES_PER_BAND * sum(heights))
    axes = figure.add_subplot()
    middles, top = [], 0.0
    for (_, members), height in zip(families, heights, strict=True):
        _band(axes, members, top, height)
        middles.append(top + height / 2)
        top += height
        axes.axhline(top, color="#e8e8e8", linewidth=0.5)
    quiet_rows(axes, [_name(family, members) for family, members in families], middles)
    axes.set_ylim(top, 0)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("tokens/s of one GPU (solid: measured; hollow: predicted)")
    headline(figure, _table_title(rows, families, generation))
    return figure


def _band(axes: Axes, members: Sequence[MeasuredRow], top: float, height: float) -> None:
    """Draw a family's runs one under the other, slowest first."""
    ordered = sorted(members, key=lambda row: row.measured)
    inner = MARGIN * height
    spacing = (height - 2 * inner) / len(ordered)
    places = [top + inner + spacing * (i + 0.5) for i in range(len(ordered))]
    measured = [row.measured for row in ordered]
    predicted = [row.measured * row.ratio for row in ordered]
    axes.hlines(places, measured, predicted, color="#bdbdbd", linewidth=0.6)
    axes.scatter(measured, places, s=9, zorder=3, **MEASURED)
    axes.scatter(predicted, places, s=14, zorder=3, **PREDICTED)


def _families(rows: Sequence[MeasuredRow]) -> list[tuple[str, list[MeasuredRow]]]:
    groups: dict[str, list[MeasuredRow]] = {}
    for row in rows:
        groups.setdefault(row.family, []).append(row)
    return sorted(groups.items(), key=lambda item: (-_error(item[1]), item[0]))


def _error(rows: Sequence[MeasuredRow]) -> float:
    return mean(abs(row.ratio - 1) for row in rows)


def _name(family: str, members: Sequence[MeasuredRow]) -> str:
    bias = median(row.ratio for row in members) - 1
    return f"{family}  {_error(members):.0%} off, median {bias:+.0%}"


def _table_title(
    rows: Sequence[MeasuredRow], families: Sequence[tuple[str, list[MeasuredRow]]], generation: str
) -> str:
    over_families = mean(_error(members) for _, members in families)
    # AMD's are acronyms (CDNA), NVIDIA's are people.
    who = generation.upper() if generation.startswith("cdna") else generation.capitalize()
    runs = "1 run" if len(rows) == 1 else f"{len(rows):,} runs"
    return (
        f"{who}: {runs} of {len(families)} "
        f"{'family is' if len(families) == 1 else 'families are'} predicted "
        f"{over_families:.0%} off on average, the median run "
        f"{median(abs(row.ratio - 1) for row in rows):.0%}"
    )
