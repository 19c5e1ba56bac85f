"""The axes of the search space: which values each may take before any rule is asked.

An axis is free unless constrained. Free degrees take every divisor of the GPUs, micro-batches
every divisor of the batch, choices every member of their enumeration. Where a free axis would run
through values that nobody gains from, a *convention* (below) leaves them out and is counted like a
rule; a flag that names the value brings it back.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import ceil

import numpy as np
from numpy.typing import NDArray

from costmodels.hardware import Cluster
from costmodels.job import Target, TrainingJob
from costmodels.layout import Offload, Recompute
from costmodels.layout_table import CONTEXT_PARALLEL_TYPES, RECOMPUTES, SCHEDULES
from costmodels.model import ModelSpec
from costmodels.virtual_splits import MOST_FROM_LAST, head_in_layers
from planner.constraints import Constraints
from planner.rules.allowed import OFFLOADS, divisors
from planner.rules.rule import CUTS_PARAMETERS

# Tensor parallelism communicates twice per layer and direction and nothing hides it: it always
# takes the innermost place. The other three are tried in every order.
RANK_ORDERS = (
    ("tp", "cp", "dp", "pp"),
    ("tp", "cp", "pp", "dp"),
    ("tp", "dp", "cp", "pp"),
    ("tp", "dp", "pp", "cp"),
    ("tp", "pp", "cp", "dp"),
    ("tp", "pp", "dp", "cp"),
)
MOST_STAGES_PER_RANK = 12  # chosen: published runs interleave up to 12
WHOLE_GROUP = 0  # codes of the axis "zero_group": all of dp * cp, or
DOMAIN_GROUP = -1  # the ranks of it inside one scale-up domain; else the number itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of the product.

    Attributes:
        name: What the axis is called.
        columns: Columns of LayoutTable that it fills.
        values: One row per choice, one entry per column.
        free: Whether the user left it open; conventions hold on free axes only.

    """

    name: str
    columns: tuple[str, ...]
    values: NDArray[np.int64]
    free: bool

    def __len__(self) -> int:
        """Return the number of choices."""
        return len(self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """All axes in the order in which the space unfolds, and the rank orders behind their codes."""

    axes: tuple[Axis, ...]
    rank_orders: tuple[tuple[str, ...], ...]

    def named(self, name: str) -> Axis:
        """Return an axis by its name."""
        return next(axis for axis in self.axes if axis.name == name)

    @property
    def num_layouts(self) -> int:
        """Size of the whole product, before any rule."""
        product = 1
        for axis in self.axes:
            product *= len(axis)
        return product


def axes_of(model: ModelSpec, job: TrainingJob, cluster: Cluster, constraints: Constraints) -> Axes:
    """Return the axes of a job on a cluster under constraints."""
    degrees = divisors(cluster.num_gpus)
    expert_degrees = degrees if model.moe else (1,)
    orders = constraints.rank_order or RANK_ORDERS
    stages = tuple(range(1, MOST_STAGES_PER_RANK + 1))

    def numbers(name: str, free: Iterable[int]) -> Axis:
        given = getattr(constraints, name)
        return _axis(name, free if given is None else given, free=given is None)

    def choices(name: str, members: tuple[StrEnum, ...]) -> Axis:
        given = getattr(constraints, name)
        codes = range(len(members)) if given is None else (members.index(v) for v in given)
        return _axis(name, codes, free=given is None)

    return Axes(
        axes=(
            numbers("tensor_parallel", degrees),
            numbers("pipeline_parallel", degrees),
            numbers("context_parallel", degrees),
            numbers("expert_tensor_parallel", expert_degrees),
            numbers("expert_parallel", expert_degrees),
            numbers("micro_batch_size", divisors(job.global_batch_size)),
            numbers("sequence_parallel", (1, 0)),
            choices("context_parallel_type", CONTEXT_PARALLEL_TYPES),
            choices("schedule", SCHEDULES),
            numbers("stages_per_rank", stages),
            _axis("lighter_last", range(_most_from_last(model, constraints) + 1), free=True),
            _zero_axis(job, constraints),
            numbers("zero_group", (WHOLE_GROUP, DOMAIN_GROUP)),
            _recompute_axis(constraints),
            _offload_axis(constraints),
            # Last: where groups lie changes time, not memory.
            _axis("rank_order", range(len(orders)), free=constraints.rank_order is None),
        ),
        rank_orders=orders,
    )


def _most_from_last(model: ModelSpec, constraints: Constraints) -> int:
    """Return how many layers the last stage may give up: fewer than the head weighs."""
    if constraints.layers_per_stage is not None or constraints.splits is not None:
        return 0
    return min(ceil(head_in_layers(model)) - 1, MOST_FROM_LAST)


def _axis(name: str, values: Iterable[int], *, free: bool) -> Axis:
    column = np.array([int(v) for v in dict.fromkeys(values)], dtype=np.int64)
    return Axis(name=name, columns=(name,), values=column[:, None], free=free)


def _zero_axis(job: TrainingJob, constraints: Constraints) -> Axis:
    """The stage of ZeRO, and whether stage 3 keeps what it gathers, which native alone is told."""
    given = constraints.zero_stage
    stages = tuple(range(4)) if given is None else given
    kept = constraints.keep_gathered
    if kept is None:
        kept = (False, True) if job.target is Target.NATIVE else (False,)
    choices = [
        (stage, keeps)
        for stage in stages
        for keeps in kept
        if stage == CUTS_PARAMETERS or not keeps
    ]
    # Keeping that is asked for without its stage is for the rules to refuse.
    values = np.array(choices or [(stage, True) for stage in stages], dtype=np.int64)
    columns = ("zero_stage", "keep_gathered")
    return Axis(name="zero_stage", columns=columns, values=values, free=given is None)


def _recompute_axis(constraints: Constraints) -> Axis:
    """Recomputing a number of layers is full recomputation."""
    given = constraints.recompute
    if given is None and constraints.recompute_layers:
        given = (Recompute.FULL,)
    codes = range(len(RECOMPUTES)) if given is None else (RECOMPUTES.index(v) for v in given)
    return _axis("recompute", codes, free=given is None)


def _offload_axis(constraints: Constraints) -> Axis:
    """Activations go to the host on request only: the time model does not price that traffic."""
    free = tuple(combo for combo in OFFLOADS if Offload.ACTIVATIONS not in combo)
    given = free if constraints.offload is None else constraints.offload
    parts = (Offload.OPTIMIZER, Offload.PARAMETERS, Offload.ACTIVATIONS)
    return Axis(
        name="offload",
        columns=tuple(f"offload_{part.value}" for part in parts),
        values=np.array([[int(part in combo) for part in parts] for combo in given]),
        free=constraints.offload is None,
    )
