"""`planner apply`: lower a plan to something that runs."""

import json
import shlex
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from costmodels.job import Target
from planner.cli import NoAnswerError
from planner.cli.modules import add_module_flag

if TYPE_CHECKING:
    from planner.emit import Emission
    from planner.plan import Plan

EXAMPLE = "planner apply plan.json -o run/ && bash run/launch.sh"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the verb's flags."""
    parser.add_argument("plan", type=Path, metavar="PLAN", help="written by planner search -o")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="folder to write; nothing without it"
    )
    parser.add_argument(
        "--target",
        choices=[target.value for target in Target],
        help="framework to write for (default: the plan's)",
    )
    add_module_flag(parser)


def run(arguments: Namespace) -> int:
    """Emit the plan and print it, or write it as a folder."""
    from planner.emit import CannotExpress, IllegalPlanError, emit
    from planner.files import write_folder
    from planner.plan import read_plan

    plan = read_plan(arguments.plan)
    target = Target(arguments.target) if arguments.target else plan.job.target
    try:
        emission = emit(plan, target, arguments.module)
    except (CannotExpress, IllegalPlanError) as error:
        raise NoAnswerError(f"{error}{_hint(plan, target)}") from error
    if arguments.output:
        write_folder(arguments.output, {file.path: file.text for file in emission.files})
    if arguments.json:
        print(json.dumps(emission.to_json()))
    else:
        print(_summary(emission, arguments.output))
    return 0


def _hint(plan: "Plan", target: Target) -> str:
    """Say what to do about a plan that was made for another framework."""
    from planner.rules.native_jobs import TRACED

    searched = plan.job.target
    if searched is target or plan.model.architecture == TRACED:  # no other target runs modules
        return ""
    return f" (this plan was searched for {searched}; search again with --target {target})"


def _summary(emission: "Emission", output: Path | None) -> str:
    lines = [f"{emission.target} runs this plan with"]
    lines += [
        f"  {variable.name}={variable.value}  # {variable.reason}"
        for variable in emission.environment
    ]
    lines.append(f"  {shlex.join(emission.command)}")
    names = ", ".join(file.path for file in emission.files)
    if output is None:
        lines.append(f"files: {names} (-o DIR writes them)")
    else:
        lines.append(f"wrote {names} to {output}")
    return "\n".join(lines)
