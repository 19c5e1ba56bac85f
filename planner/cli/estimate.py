"""`planner estimate`: judge one layout given by flags or by a plan file."""

import json
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from planner.cli import NO_ANSWER
from planner.cli.flags import (
    add_input_flags,
    add_layout_flags,
    read_cluster,
    read_data_parallel,
    read_hardware_flags,
    read_job,
    read_layout,
    read_model_flag,
)

if TYPE_CHECKING:
    from costmodels.hardware import Cluster
    from costmodels.job import TrainingJob
    from costmodels.model import ModelSpec
    from planner.judge import Judgement

    Inputs = tuple[ModelSpec, TrainingJob, Cluster]

FLAGS = {"overrides": "--set", "zero_stage": "--zero"}  # the others are called as they are kept
EXAMPLE = "planner estimate --model 70b --gpus 64 --tp 8 --pp 2 --zero 1 --recompute full"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the verb's flags."""
    parser.add_argument(
        "plan", nargs="?", type=Path, metavar="PLAN", help="judge a plan file instead of flags"
    )
    add_input_flags(parser, required=False)
    add_layout_flags(parser)


def run(arguments: Namespace) -> int:
    """Judge the layout and print what came out; 1 where it is illegal or does not fit."""
    from planner.contract import judgement_json
    from planner.report import judgement_text

    if arguments.plan:
        _refuse_flags_beside_a_plan(arguments)
    inputs, judgement = _from_file(arguments.plan) if arguments.plan else _from_flags(arguments)
    if arguments.json:
        print(json.dumps(judgement_json(judgement, *inputs)))
    else:
        print(judgement_text(judgement, *inputs))
    return 0 if judgement.runs else NO_ANSWER


def _refuse_flags_beside_a_plan(arguments: Namespace) -> None:
    """A plan says everything; what flags say besides would have to be ignored."""
    flags = ArgumentParser()
    add_arguments(flags)
    unset = vars(flags.parse_args([]))
    given = [name for name, value in unset.items() if getattr(arguments, name) != value]
    words = [FLAGS.get(name, f"--{name.replace('_', '-')}") for name in given if name != "plan"]
    if words:
        raise ValueError(
            f"{', '.join(words)} beside {arguments.plan} would be ignored, for a plan says "
            "everything; leave one out (planner explain changes a plan: --why-not, --what-if)"
        )


def _from_file(path: Path) -> "tuple[Inputs, Judgement]":
    from planner.judge import judge
    from planner.plan import read_plan

    plan = read_plan(path)
    inputs = (plan.model, plan.job, plan.cluster)
    return inputs, judge(*inputs, plan.layout)


def _from_flags(arguments: Namespace) -> "tuple[Inputs, Judgement]":
    from planner.judge import judge
    from planner.search.axes import RANK_ORDERS

    if arguments.model is None or arguments.gpus is None:
        raise ValueError("name a plan file, or --model and --gpus")
    model = read_model_flag(arguments)
    cluster = read_cluster(arguments, read_hardware_flags(arguments))
    per_forward = read_data_parallel(arguments, cluster) * (arguments.micro_batch_size or 1)
    job = read_job(arguments, model, max(cluster.num_gpus, per_forward), per_forward)
    layout = read_layout(arguments, model, job, cluster)
    # As in a search, unstated ranks take the fastest order; the first of equals is the usual one.
    orders = (arguments.rank_order,) if arguments.rank_order else RANK_ORDERS
    judgement = min(
        (judge(model, job, cluster, replace(layout, rank_order=order)) for order in orders),
        key=lambda judged: judged.time.step_seconds if judged.time else 0.0,
    )
    return (model, job, cluster), judgement
