"""`planner search`: find, prove and explain the best layouts."""

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from planner.cli import NO_ANSWER, NoAnswerError
from planner.cli.constraint_flags import add_constraint_flags, read_constraints
from planner.cli.flags import (
    add_input_flags,
    read_hardware_flags,
    read_job,
    read_model_flag,
)
from planner.cli.values import positive, read_gpus

if TYPE_CHECKING:
    from costmodels.hardware import HardwareProfile
    from costmodels.job import TrainingJob
    from costmodels.model import ModelSpec
    from planner.constraints import Constraints
    from planner.search.sizing import Sized
    from planner.search_report import Answer

TOP = 5  # chosen: what a screen shows beside its reasons
FRONT_POINTS = 4  # chosen: each after the first is a search of its own
FRONT_SHRINK = 0.85  # chosen: three of these come to 61 % of the memory
EXAMPLE = "planner search --gpus 64 --model 70b -o plan.json"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the verb's flags."""
    add_input_flags(parser, gpus="total GPUs; auto: the fewest that fit; 8..1024: a sweep")
    add_constraint_flags(parser)
    parser.add_argument(
        "--top",
        type=positive,
        metavar="K",
        help=f"layouts to list and to prove (default {TOP}); adds the fronts of time against "
        "memory and against GPUs",
    )
    parser.add_argument(
        "--workers",
        type=positive,
        default=1,
        metavar="N",
        help="processes that search counts of GPUs side by side (a range, auto, --top); the "
        "answer is the same with any number (default 1)",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the best plan")


def run(arguments: Namespace) -> int:
    """Search, print the ranking and write the best plan; 1 where nothing fits."""
    from planner.files import refuse_unwritable
    from planner.plan import write_plan
    from planner.search_report import answer_json, answer_lines, best_plan

    if arguments.output:
        refuse_unwritable(arguments.output)  # now, not after a search of minutes
    started = time.perf_counter()
    model = read_model_flag(arguments)
    profile = read_hardware_flags(arguments)
    constraints = _constraints(arguments, model)
    answer = _answer(
        _Question(arguments=arguments, model=model, profile=profile, constraints=constraints)
    )
    _say_what_is_not_run(answer)
    if arguments.output and answer.plans:
        write_plan(best_plan(answer), arguments.output)
    if arguments.json:
        print(json.dumps(answer_json(answer, time.perf_counter() - started)))
    else:
        print("\n".join(answer_lines(answer)))
        if arguments.output and answer.plans:
            print(f"wrote {arguments.output}")
    return 0 if answer.plans else NO_ANSWER


def _say_what_is_not_run(answer: "Answer") -> None:
    """Say what `apply` will refuse of a job that is planned for our own runtime all the same."""
    from costmodels.job import Target
    from planner.rules.native_jobs import job_refusals

    jobs = dict.fromkeys(found.job for found in answer.found if found.job.target is Target.NATIVE)
    reasons = (
        reason for job in jobs for reason in job_refusals(answer.model, job, has_module=True)
    )
    for reason in dict.fromkeys(reasons):
        print(f"note: the native runtime does not run this job: {reason}", file=sys.stderr)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """What the flags ask, but for the count of GPUs."""

    arguments: Namespace
    model: "ModelSpec"
    profile: "HardwareProfile"
    constraints: "Constraints"

    @property
    def node(self) -> int:
        """GPUs of a node."""
        return self.arguments.gpus_per_node or self.profile.gpus_per_node

    def job_of(self, gpus: int) -> "TrainingJob":
        """Return the job at a count of GPUs; a default batch follows it."""
        return read_job(self.arguments, self.model, gpus)


def _constraints(arguments: Namespace, model: "ModelSpec") -> "Constraints":
    """Read the constraints; only what `apply` can write is offered."""
    from costmodels.job import Target
    from planner.constraints import applicable

    return applicable(read_constraints(arguments), Target(arguments.target), model)


def _answer(asked: _Question) -> "Answer":
    """Search at one count of GPUs, at the fewest that fit, or at every count of a range."""
    from planner.search.fewest import fewest_gpus
    from planner.search.ranking import share_allowed
    from planner.search.sizing import counts_between
    from planner.search_report import Answer

    wanted = read_gpus(asked.arguments.gpus)
    if isinstance(wanted, range):
        sizes = _sweep(asked, counts_between(wanted.start, wanted.stop, asked.node))
        fitting = [sized.cluster.num_gpus for sized in sizes if sized.result.plans]
        return Answer(
            model=asked.model,
            found=sizes,
            smallest_gpus=min(fitting, default=None),
            constraints=asked.constraints,
        )
    if wanted is not None:
        return _at_one_count(asked, wanted)
    fewest = fewest_gpus(
        asked.model,
        asked.job_of,
        asked.profile,
        asked.constraints,
        share=share_allowed(asked.constraints),
        node=asked.node,
        workers=asked.arguments.workers,
    )
    if fewest is None:
        raise NoAnswerError(_why_no_count_fits(asked))
    return replace(_at_one_count(asked, fewest.num_gpus), smallest_gpus=fewest.num_gpus)


def _why_no_count_fits(asked: _Question) -> str:
    """Say which rules one node breaks already, where it breaks any."""
    from costmodels.hardware import make_cluster
    from planner.explain.no_layout import plainest_and_its_violations

    cluster = make_cluster(asked.profile, asked.node, asked.node)
    _, broken = plainest_and_its_violations(
        asked.model, asked.job_of(asked.node), cluster, asked.constraints
    )
    reasons = "; ".join(f"{violation.rule}: {violation.message}" for violation in broken)
    words = "no number of GPUs fits under these constraints"
    return f"{words}; on {asked.node} GPUs {reasons}" if reasons else words


def _at_one_count(asked: _Question, gpus: int) -> "Answer":
    """Search at a count of GPUs; with `--top` the fronts too."""
    from costmodels.hardware import make_cluster
    from planner.search.pareto import memory_front
    from planner.search.ranking import search
    from planner.search.sizing import Sized, counts_around
    from planner.search_report import Answer

    top = asked.arguments.top
    job, cluster = asked.job_of(gpus), make_cluster(asked.profile, gpus, asked.node)
    result = search(asked.model, job, cluster, asked.constraints, top=top or TOP)
    found = Sized(job=job, cluster=cluster, result=result)
    answer = Answer(model=asked.model, found=(found,), constraints=asked.constraints)
    if not top or not result.plans:
        return answer
    others = _sweep(asked, counts_around(gpus, asked.node))
    return replace(
        answer,
        sizes=tuple(sorted((found, *others), key=lambda sized: sized.cluster.num_gpus)),
        memory_front=memory_front(
            asked.model,
            job,
            cluster,
            asked.constraints,
            best=result.plans[0],
            steps=FRONT_POINTS,
            shrink=FRONT_SHRINK,
        ),
    )


def _sweep(asked: _Question, counts: tuple[int, ...]) -> "tuple[Sized, ...]":
    from planner.search.sizing import sweep

    return sweep(
        asked.model,
        asked.job_of,
        asked.profile,
        asked.constraints,
        counts=counts,
        node=asked.node,
        workers=asked.arguments.workers,
    )
