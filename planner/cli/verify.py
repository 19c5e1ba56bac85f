"""`planner verify`: dry-run every rank role of a plan and compare it with the plan's estimate."""

import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from planner.cli import NO_ANSWER, NoAnswerError
from planner.cli.modules import add_module_flag

if TYPE_CHECKING:
    from runtime.verify import RoleReport, VerifyReport

EXAMPLE = "planner verify plan.json"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the verb's flags."""
    parser.add_argument("plan", type=Path, metavar="PLAN", help="written by planner search -o")
    add_module_flag(parser)


def run(arguments: Namespace) -> int:
    """Verify and print; 1 where any figure differs beyond its tolerance."""
    from planner.cli.extras import runtime_module
    from planner.emit import IllegalPlanError
    from planner.emit.native import refuse_unsupported
    from planner.plan import read_plan

    plan = read_plan(arguments.plan)
    try:
        refuse_unsupported(plan, arguments.module)
    except IllegalPlanError as error:
        raise NoAnswerError(str(error)) from error
    runtime = runtime_module("runtime.verify", "verify")
    report: VerifyReport = runtime.verify(
        plan, arguments.module, progress=lambda words: print(words, file=sys.stderr, flush=True)
    )
    if arguments.json:
        print(json.dumps(report.to_json()))
    else:
        print("\n".join(_lines(report)))
    return 0 if report.agrees else NO_ANSWER


def _lines(report: "VerifyReport") -> list[str]:
    lines = [f"warning: {warning}" for warning in report.warnings]
    for role in report.roles:
        lines.append(f"ranks {role.ranks[0]}-{role.ranks[-1]}: {_verdict(role.agrees)}")
        lines += _role_lines(role)
    lines += [f"collectives disagree: {words}" for words in report.disagreements]
    if not report.disagreements:
        lines.append("collectives agree: every group calls the same in the same order")
    return lines


def _role_lines(role: "RoleReport") -> list[str]:
    from costmodels.units import GIB, MIB

    exact = [("FLOPs", role.flops), *((f"bytes {axis}", pair) for axis, pair in role.num_bytes)]
    lines = [
        f"  {name:<12} {pair.graph:>24,.0f} in the graph, {pair.estimate:>24,.0f} estimated"
        f"{'' if pair.agrees() else '  DIFFER'}"
        for name, pair in exact
    ]
    peak = role.live_peak
    size, unit = (GIB, "GiB") if peak.graph >= GIB else (MIB, "MiB")
    share = 100 * (peak.estimate / peak.graph - 1) if peak.graph else 0.0
    lines.append(
        f"  {'live peak':<12} {peak.graph / size:>20.2f} {unit} in the graph, "
        f"{peak.estimate / size:>20.2f} {unit} estimated ({share:+.1f} %)"
        f"{'' if role.peak_agrees else '  DIFFER'}"
    )
    return lines


def _verdict(agrees: bool) -> str:
    return "graph and estimate agree" if agrees else "graph and estimate DIFFER"
