"""Plan: the file between search and everything after it; it is enough by itself.

JSON, UTF-8, sorted keys: the inputs whole (model, hardware, job), the layout, what the planner
said of it, and what the solver proved. The same inputs give the same bytes: no clock, no host,
floats rounded to 9 significant digits. A plan is data from strangers: it is decoded strictly and
judged again by the rules before anything is built from it.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from costmodels.hardware import Cluster
from costmodels.job import TrainingJob
from costmodels.layout import Layout
from costmodels.model import ModelSpec
from planner import __version__
from planner.codec import DecodeError, Json, decode, encode
from planner.files import read_json, write_text

SCHEMA = 1
STATUSES = ("optimal", "feasible", "given")


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverStatus:
    """What the search proved of a plan.

    Attributes:
        status: "optimal" (proved), "feasible" (limits ended the search) or "given" (the user's).
        num_layouts: Size of the product space.
        num_solved: Layouts whose exact value was computed.
        bound_seconds: Lower bound of the step time over the whole space.

    """

    status: str
    num_layouts: int = 0
    num_solved: int = 0
    bound_seconds: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what no search says."""
        if self.status not in STATUSES:
            raise ValueError(
                f"status must be one of {', '.join(STATUSES)}, not {self.status!r:.60}"
            )
        if min(self.num_layouts, self.num_solved, self.bound_seconds) < 0:
            raise ValueError("num_layouts, num_solved and bound_seconds must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One layout of one job, with what was said of it.

    Attributes:
        estimate: The contract's estimate object as it was printed.
        actions: The pipeline's table, one string of torch actions per rank ("0F0 0F1 0B0 ...");
            empty without a pipeline.

    """

    model: ModelSpec
    job: TrainingJob
    cluster: Cluster
    layout: Layout
    estimate: dict[str, Json]
    solver: SolverStatus
    actions: tuple[str, ...] = ()


def plan_text(plan: Plan) -> str:
    """Return the plan file's text: stable bytes for the same plan."""
    document = {
        "schema": SCHEMA,
        "version": __version__,
        "model": encode(plan.model),
        "job": encode(plan.job),
        "cluster": encode(plan.cluster),
        "layout": encode(plan.layout),
        "estimate": plan.estimate,
        "solver": encode(plan.solver),
        "actions": list(plan.actions),
    }
    return json.dumps(document, sort_keys=True, indent=1, ensure_ascii=False) + "\n"


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan atomically; ValueError names the file where that fails."""
    write_text(path, plan_text(plan))


def read_plan(path: Path) -> Plan:
    """Read and validate a plan.

    Raises:
        ValueError: The file is no plan, or one of another schema; the message names the file and
            the place in it.

    """
    document = read_json(path)
    if not isinstance(document, dict) or "layout" not in document or "cluster" not in document:
        raise ValueError(f"{path} is not a plan (write one with planner search -o FILE)")
    if document.get("schema") != SCHEMA or document.get("schema") is True:  # True == 1
        raise ValueError(
            f"{path} has plan schema {document.get('schema')!r}; this version reads {SCHEMA}"
        )
    try:
        return _decode_plan(document)
    except DecodeError as error:
        raise ValueError(f"{path} is not a valid plan: {error}") from error


def _decode_plan(document: dict[str, object]) -> Plan:
    known = {"schema", "version", "model", "job", "cluster", "layout", "estimate", "solver"}
    unknown = sorted(set(document) - known - {"actions"})
    if unknown:
        raise DecodeError(f"unknown key {unknown[0]!r}")
    missing = sorted(known - set(document))
    if missing:
        raise DecodeError(f"the key {missing[0]!r} is missing")
    if not isinstance(document["version"], str):
        raise DecodeError("version must be text")
    estimate = document["estimate"]
    actions = document.get("actions", [])
    if not isinstance(estimate, dict):
        raise DecodeError("estimate must be an object")
    if not isinstance(actions, list) or not all(isinstance(row, str) for row in actions):
        raise DecodeError("actions must be a list of strings")
    return Plan(
        model=decode(ModelSpec, document["model"], "model"),
        job=decode(TrainingJob, document["job"], "job"),
        cluster=decode(Cluster, document["cluster"], "cluster"),
        layout=decode(Layout, document["layout"], "layout"),
        estimate=estimate,
        solver=decode(SolverStatus, document["solver"], "solver"),
        actions=tuple(actions),
    )
