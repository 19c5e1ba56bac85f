"""`planner plot`: figures of plans, run folders, tables of measured runs and searches."""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from planner.plan import Plan

EXAMPLE = "planner plot plan.json -o plan.svg"
PLAN_KINDS = ("overview", "time", "memory", "timeline")
KINDS = (*PLAN_KINDS, "measured", "scaling")
SEPARATE = ".csv"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the verb's flags."""
    parser.add_argument(
        "inputs",
        nargs="+",
        type=Path,
        metavar="INPUT",
        help="a plan, several plans or the output of search --json (scaling), run folders "
        "or measured sweeps of examples/compare (predicted against measured), or a CSV of measured "
        "runs (one figure per GPU generation)",
    )
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        type=Path,
        metavar="FILE",
        help=".svg, .png or .pdf; figures of one generation each get its name before the suffix",
    )
    parser.add_argument(
        "--kind", choices=KINDS, help="which figure, where an input allows more than one"
    )


def run(arguments: Namespace) -> int:
    """Draw the figures and say what was written and what each one shows."""
    from planner.files import refuse_unwritable
    from planner.plots.style import FORMATS, write_figure

    output: Path = arguments.output
    if output.suffix.removeprefix(".").lower() not in FORMATS:
        raise ValueError(f"cannot draw {output}: its suffix must be one of .{', .'.join(FORMATS)}")
    refuse_unwritable(output)  # now, not after a table is predicted
    figures = _figures(arguments.inputs, arguments.kind)
    written = []
    for name, figure in figures.items():
        path = output.with_name(f"{output.stem}-{name}{output.suffix}") if name else output
        write_figure(figure, path)
        title = " ".join(figure.get_suptitle().split())
        written.append({"file": str(path), "title": title})
    if arguments.json:
        print(json.dumps({"schema": 1, "figures": written}))
    else:
        for one in written:
            print(f"{one['file']}: {one['title']}")
    return 0


def _figures(inputs: Sequence[Path], kind: str | None) -> dict[str, "Figure"]:
    """Return the figures by the part of their file's name that tells them apart."""
    if all(path.is_dir() for path in inputs):
        _refuse_other_kinds(kind, ("measured",), "run folders")
        from planner.measured.runs import read_run
        from planner.plots.accuracy import runs_figure

        return {"": runs_figure([read_run(path) for path in inputs])}
    if any(path.is_dir() for path in inputs):
        raise ValueError("run folders and files cannot share a figure")
    if inputs[0].suffix.lower() == SEPARATE:
        _refuse_other_kinds(kind, ("measured",), "a table of measured runs")
        return _table_figures(inputs)
    return {"": _plan_figure(inputs, kind)}


def _table_figures(inputs: Sequence[Path]) -> dict[str, "Figure"]:
    from planner.measured.runs import rows_by_generation
    from planner.measured.validate import PREDICTED, predict_all, read_rows
    from planner.plots.accuracy import table_figure

    if len(inputs) > 1:
        raise ValueError(f"one table at a time, not {len(inputs)}")
    rows = read_rows(inputs[0])
    if rows and not set(PREDICTED) <= set(rows[0]):
        print(f"predicting {len(rows)} rows", file=sys.stderr)
        rows = predict_all(rows)
    groups = rows_by_generation(rows)
    if not groups:
        raise ValueError(f"{inputs[0]} has no row with a measured and a predicted speed")
    figures = {name: table_figure(members, name) for name, members in groups.items()}
    return {"": next(iter(figures.values()))} if len(figures) == 1 else figures


def _plan_figure(inputs: Sequence[Path], kind: str | None) -> "Figure":
    from planner.files import read_json
    from planner.measured.sweeps import is_sweep, read_sweep, runs_of
    from planner.plan import read_plan

    documents = [read_json(path) for path in inputs]
    if any(is_sweep(document) for document in documents):
        _refuse_other_kinds(kind, ("measured",), "measured sweeps")
        from planner.plots.accuracy import runs_figure

        return runs_figure([run for path in inputs for run in runs_of(read_sweep(path))])
    searches = [d for d in documents if isinstance(d, dict) and "plans" in d]
    if searches or len(inputs) > 1 or kind == "scaling":
        _refuse_other_kinds(kind, ("scaling",), "searches or several plans")
        from planner.plots.scaling import points_of, scaling_figure

        estimates: list[object] = []
        for path, document in zip(inputs, documents, strict=True):
            if document in searches:
                if not isinstance(document["plans"], list):
                    raise ValueError(f"{path}: plans must be a list of estimates")
                estimates += document["plans"]
            else:
                estimates.append(read_plan(path).estimate)
        if not estimates:
            raise ValueError("the search found no plan to draw")
        return scaling_figure(points_of(estimates))
    _refuse_other_kinds(kind, PLAN_KINDS, "a plan")
    return _one_plan_figure(read_plan(inputs[0]), kind or "overview")


def _one_plan_figure(plan: "Plan", kind: str) -> "Figure":
    from costmodels.memory.estimate import estimate_memory
    from planner.plots.breakdown import memory_figure, time_figure
    from planner.plots.overview import overview_figure, terms_of
    from planner.plots.timeline import pipeline_of, timeline_figure

    if kind == "overview":
        return overview_figure(plan)
    if kind == "timeline":
        return timeline_figure(pipeline_of(plan))
    if kind == "time":
        return time_figure(terms_of(plan))
    return memory_figure(estimate_memory(plan.model, plan.job, plan.cluster, plan.layout))


def _refuse_other_kinds(kind: str | None, allowed: Sequence[str], what: str) -> None:
    if kind is not None and kind not in allowed:
        raise ValueError(f"--kind {kind} does not go with {what}; allowed: {', '.join(allowed)}")
