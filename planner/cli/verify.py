"""`planner verify`: dry-run every rank role of a plan and compare it with its estimate."""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from planner.cli import NO_ANSWER

if TYPE_CHECKING:
    from runtime.verify import Pair, VerifyReport

EXAMPLE = "planner verify plan.json"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the verb's flags."""
    parser.add_argument("plan", type=Path, metavar="PLAN", help="written by planner search -o")


def run(arguments: Namespace) -> int:
    """Verify the plan and print both sides of every figure; 1 where they differ."""
    from planner.plan import read_plan

    plan = read_plan(arguments.plan)
    try:
        from runtime.verify import verify
    except ModuleNotFoundError as error:
        raise ValueError(f"planner verify needs {error.name}: pip install '.[runtime]'") from error
    report = verify(plan)
    print(json.dumps(report.to_json()) if arguments.json else _text(report))
    return 0 if report.agrees else NO_ANSWER


def _text(report: "VerifyReport") -> str:
    from costmodels.units import GIB, TFLOP
    from runtime.verify import PEAK_TOLERANCE, format_ranks

    lines = [f"{'ranks':<16} {'figure':<12} {'graph':>14} {'estimate':>14}"]
    for role in report.roles:
        ranks = format_ranks(role.ranks)
        figures = [
            ("TFLOP", role.flops, TFLOP, 0.0),
            *((f"{axis} GiB", pair, GIB, 0.0) for axis, pair in role.num_bytes),
            ("peak GiB", role.live_peak, GIB, PEAK_TOLERANCE),
        ]
        lines += [_line(ranks, *figure) for figure in figures]
    lines += [f"warning: {warning}" for warning in report.warnings]
    lines += report.disagreements or ["collectives agree across ranks"]
    return "\n".join(lines)


def _line(ranks: str, name: str, pair: "Pair", unit: float, tolerance: float) -> str:
    mark = "" if pair.agrees(tolerance) else "  differs"
    return f"{ranks:<16} {name:<12} {pair.graph / unit:>14.4f} {pair.estimate / unit:>14.4f}{mark}"
