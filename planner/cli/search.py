"""`planner search`: find, prove and explain the best layouts."""

import json
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from planner.cli import NO_ANSWER
from planner.cli.constraint_flags import add_constraint_flags, read_constraints
from planner.cli.flags import (
    add_input_flags,
    positive,
    read_cluster,
    read_hardware_flags,
    read_job,
    read_model_flag,
)

if TYPE_CHECKING:
    from costmodels.hardware import Cluster
    from costmodels.job import TrainingJob
    from costmodels.model import ModelSpec
    from planner.search import SearchResult

EXAMPLE = "planner search --gpus 64 --model 70b -o plan.json"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the verb's flags."""
    add_input_flags(parser, gpus="total GPUs; auto: the fewest that fit; 8..1024: a sweep")
    add_constraint_flags(parser)
    parser.add_argument("--top", type=positive, default=10, metavar="K", help="layouts to list")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the best plan")


def run(arguments: Namespace) -> int:
    """Search, print the ranking and write the best plan; 1 where nothing fits."""
    from planner.search import search

    started = time.perf_counter()
    model = read_model_flag(arguments)
    cluster = read_cluster(arguments, read_hardware_flags(arguments))
    job = read_job(arguments, model, cluster.num_gpus)
    result = search(model, job, cluster, read_constraints(arguments), top=arguments.top)
    if arguments.output and result.plans:
        _write_best(result, model, job, cluster, arguments.output)
    seconds = time.perf_counter() - started
    if arguments.json:
        print(json.dumps(_result_json(result, model, job, cluster, seconds)))
    else:
        print(_result_text(result, model, job, cluster))
        if arguments.output and result.plans:
            print(f"wrote {arguments.output}")
    return 0 if result.plans else NO_ANSWER


def _write_best(
    result: "SearchResult",
    model: "ModelSpec",
    job: "TrainingJob",
    cluster: "Cluster",
    path: Path,
) -> None:
    from costmodels.schedule import build_schedule
    from planner.contract import judgement_json
    from planner.plan import Plan, SolverStatus, write_plan

    best = result.plans[0]
    layout = best.layout
    actions: tuple[str, ...] = ()
    if layout.pipeline_parallel > 1:
        table = build_schedule(
            layout.schedule,
            layout.pipeline_parallel,
            layout.stages_per_rank,
            layout.num_micro_batches,
        )
        actions = tuple(" ".join(row) for row in table.strings())
    solver = SolverStatus(
        status=result.status,
        num_layouts=result.num_layouts,
        num_solved=result.num_solved,
        bound_seconds=result.bound_seconds,
    )
    plan = Plan(
        model=model,
        job=job,
        cluster=cluster,
        layout=layout,
        estimate=judgement_json(best, model, job, cluster),
        solver=solver,
        actions=actions,
    )
    write_plan(plan, path)


def _result_json(
    result: "SearchResult",
    model: "ModelSpec",
    job: "TrainingJob",
    cluster: "Cluster",
    seconds: float,
) -> dict[str, object]:
    from planner.contract import SCHEMA, judgement_json

    plans = [
        {**judgement_json(plan, model, job, cluster), "rank": rank}
        for rank, plan in enumerate(result.plans, start=1)
    ]
    return {
        "schema": SCHEMA,
        "status": result.status,
        "plans": plans,
        "num_layouts": result.num_layouts,
        "rejected": result.rejected,
        "nearest_miss": None,
        "smallest_gpus_that_fit": None,
        "search_seconds": round(seconds, 3),
    }


def _result_text(
    result: "SearchResult", model: "ModelSpec", job: "TrainingJob", cluster: "Cluster"
) -> str:
    from planner.report import heading, ranking_table

    lines = [heading(model, job, cluster), ""]
    lines += ranking_table(result.plans)
    most = sorted(result.rejected.items(), key=lambda item: -item[1])[:3]
    reasons = ", ".join(f"{count:,} {rule}" for rule, count in most)
    lines.append(
        f"{result.num_layouts:,} layouts, {sum(result.rejected.values()):,} rejected: {reasons}"
    )
    lines.append(f"{result.status}")
    return "\n".join(lines)
