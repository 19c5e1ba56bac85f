"""The search space: the product of all axes, unfolded axis by axis under the rules.

    product  ->  unfold one axis  ->  derive what follows  ->  apply the rules that are now known

Data parallel follows from the GPUs, micro-batches from the batch, which is fixed. A rule is
applied as soon as every column that it reads is known, so most of the product is never built; a
partial layout that breaks a rule stands for all its completions, and `census` counts it so: the
counts of all rules and the legal layouts sum to the whole product.
"""

from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodels.hardware import Cluster
from costmodels.job import TrainingJob
from costmodels.layout import Schedule
from costmodels.layout_table import COLUMNS, SCHEDULES, IntColumn, LayoutTable, constant
from costmodels.model import ModelSpec
from planner.constraints import FREE, Constraints
from planner.rules import Case, Rule, rules_of
from planner.search.axes import DOMAIN_GROUP, WHOLE_GROUP, Axes, Axis, axes_of
from planner.search.conventions import conventions_of, domain_group

NO_GROUP = -1  # a domain-sized ZeRO group that is no choice of its own; a convention drops it
# Columns that derived ones are made from while the space unfolds.
DERIVE_FROM = {"tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel"}
_LARGE_KEY = 2**40  # times the values of one more column, still an int64


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The product of a job on a cluster, and what thins it out."""

    model: ModelSpec
    job: TrainingJob
    cluster: Cluster
    axes: Axes
    rules: tuple[Rule, ...]

    @property
    def num_layouts(self) -> int:
        """Size of the whole product, before any rule."""
        return self.axes.num_layouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """Layouts whose later axes are still open (their columns hold a neutral value).

    Attributes:
        table: One row per partial layout.
        known: Columns that are decided.
        num_axes: Axes unfolded so far.

    """

    table: LayoutTable
    known: frozenset[str]
    num_axes: int

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> "Partial":
        """Return some of the layouts."""
        return replace(self, table=self.table.take(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """How the product divides: legal layouts, and for each rule those that it rejects first."""

    num_layouts: int
    num_legal: int
    rejected: dict[str, int]


def space_of(
    model: ModelSpec,
    job: TrainingJob,
    cluster: Cluster,
    constraints: Constraints = FREE,
) -> Space:
    """Return the space of a job on a cluster under constraints."""
    axes = axes_of(model, job, cluster, constraints)
    rules = (*rules_of(job.target), *conventions_of(axes, constraints, job.target))
    return Space(model=model, job=job, cluster=cluster, axes=axes, rules=rules)


def root(space: Space) -> Partial:
    """Return the one partial layout of which nothing is decided."""
    neutral = dict.fromkeys(COLUMNS, 1)
    for name in ("recompute", "rank_order", "context_parallel_type", "zero_stage", "keep_gathered"):
        neutral[name] = 0
    for name in COLUMNS:
        if name.startswith("offload") or name in {"sequence_parallel", "lighter_last"}:
            neutral[name] = 0
    neutral["schedule"] = SCHEDULES.index(Schedule.ONE_F_ONE_B)
    columns = {name: constant(value, 1) for name, value in neutral.items()}
    table = LayoutTable(rank_orders=space.axes.rank_orders, **columns)
    return Partial(table=table, known=frozenset(), num_axes=0)


def unfold(space: Space, partial: Partial, last_axis: str) -> Partial:
    """Return every legal completion of partial layouts up to and including an axis."""
    return unfold_with_parents(space, partial, last_axis)[0]


def unfold_with_parents(
    space: Space, partial: Partial, last_axis: str
) -> tuple[Partial, NDArray[np.int64]]:
    """Unfold, and return for each completion the row that it came from."""
    names = [axis.name for axis in space.axes.axes]
    parents = np.arange(len(partial.table))
    while partial.num_axes <= names.index(last_axis):
        parents = np.repeat(parents, len(space.axes.axes[partial.num_axes]))
        partial, broken = _unfold_next(space, partial)
        kept = _legal_rows(broken, len(partial.table))
        partial, parents = partial.take(kept), parents[kept]
    return partial, parents


def legal_table(space: Space) -> LayoutTable:
    """Return every legal layout of a space; for small spaces and tests."""
    return unfold(space, root(space), space.axes.axes[-1].name).table


def census(space: Space) -> Census:
    """Count the product: how many layouts each rule rejects first, and how many are legal.

    Partial layouts that later rules cannot tell apart are merged and weighted, so that the count
    covers products of 10^13 layouts in milliseconds.
    """
    partial, weight = root(space), np.ones(1, dtype=np.int64)
    rejected: dict[str, int] = {}
    for position, axis in enumerate(space.axes.axes):
        completions = prod(len(later) for later in space.axes.axes[position + 1 :])
        partial, weight, broken = _counted(space, partial, weight, axis)
        for rule, count in broken.items():
            if count:
                rejected[rule] = rejected.get(rule, 0) + count * completions
        partial, weight = _merge(space, partial, weight)
    return Census(num_layouts=space.num_layouts, num_legal=int(weight.sum()), rejected=rejected)


def _counted(
    space: Space, partial: Partial, weight: IntColumn, axis: Axis
) -> tuple[Partial, IntColumn, dict[str, int]]:
    """Unfold one axis; return legal rows, their weights, and rejected weight by rule.

    Where no later rule reads the axis, rows that the rules decided by it cannot tell apart are
    unfolded once, and every row is weighted by how many of its values are legal.
    """
    known = partial.known | set(axis.columns)
    later = {
        column for rule in space.rules if not set(rule.reads) <= known for column in rule.reads
    }
    derives = axis.name in DERIVE_FROM | {"micro_batch_size", "zero_group"}
    if derives or later & set(axis.columns):
        unfolded, broken = _unfold_next(space, partial)
        weight = np.repeat(weight, len(axis))
        keep = _legal_rows(broken, len(unfolded.table))
        counts = {rule: int(weight[rows].sum()) for rule, rows in broken.items()}
        return unfolded.take(keep), weight[keep], counts
    decided = (rule.reads for rule in space.rules if not set(rule.reads) <= partial.known)
    reads = {column for reads in decided if set(reads) <= known for column in reads}
    first, key_of_row = _distinct(partial.table, sorted(reads & partial.known))
    unfolded, broken = _unfold_next(space, partial.take(first))
    # Sums of integers far below 2**53: exact.
    of_key = np.bincount(key_of_row, weights=weight, minlength=len(first)).astype(np.int64)
    of_value = np.repeat(of_key, len(axis))
    counts = {rule: int(of_value[rows].sum()) for rule, rows in broken.items()}
    legal = _legal_rows(broken, len(unfolded.table)).reshape(-1, len(axis)).sum(axis=1)[key_of_row]
    some = np.flatnonzero(legal)
    kept = replace(unfolded, table=partial.table.take(some))
    return kept, (weight * legal)[some], counts


def _distinct(
    table: LayoutTable, columns: list[str]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first row of each distinct combination of columns, and the one of each row."""
    key = np.zeros(len(table), dtype=np.int64)
    for column in columns:
        # Ranks of the values, so that few digits do: keys are renumbered before they overflow.
        rank = _ranks(getattr(table, column))
        key = key * (int(rank.max(initial=0)) + 1) + rank
        if key.max(initial=0) > _LARGE_KEY:
            _, key = np.unique(key, return_inverse=True)
    _, first, key_of_row = np.unique(key, return_index=True, return_inverse=True)
    return first, key_of_row


def _ranks(value: IntColumn) -> IntColumn:
    """Return the rank of each value among the distinct ones: [rows]."""
    offset = value - value.min(initial=0)
    # A slot per value is quickest; micro-batches follow the batch and may be a few huge ones.
    if offset.max(initial=0) <= 4 * len(offset) + 1024:
        rank: IntColumn = (np.cumsum(np.bincount(offset) > 0) - 1)[offset]
        return rank
    _, rank = np.unique(value, return_inverse=True)
    return rank


def _unfold_next(space: Space, partial: Partial) -> tuple[Partial, dict[str, NDArray[np.bool_]]]:
    """Unfold one axis; return its rows and, for each rule that is now known, those it rejects."""
    axis = space.axes.axes[partial.num_axes]
    table = _cross(partial.table, axis)
    known = partial.known | set(axis.columns)
    table, known = _derive(space, table, known, axis)
    case = Case(model=space.model, job=space.job, cluster=space.cluster, table=table)
    legal = np.ones(len(table), dtype=np.bool_)
    broken: dict[str, NDArray[np.bool_]] = {}
    for rule in space.rules:
        was_known = partial.num_axes > 0 and set(rule.reads) <= partial.known
        if was_known or not set(rule.reads) <= known:
            continue
        fails = legal & ~rule.holds(case)
        legal &= ~fails
        broken[rule.name] = broken.get(rule.name, np.zeros_like(legal)) | fails
    return Partial(table=table, known=known, num_axes=partial.num_axes + 1), broken


def _cross(table: LayoutTable, axis: Axis) -> LayoutTable:
    """Return every row with every choice of an axis."""
    chosen: dict[str, Any] = {
        name: np.tile(axis.values[:, position], len(table))
        for position, name in enumerate(axis.columns)
    }
    return replace(table.repeated(len(axis)), **chosen)


def _derive(
    space: Space, table: LayoutTable, known: frozenset[str], axis: Axis
) -> tuple[LayoutTable, frozenset[str]]:
    """Fill the columns that follow from those just decided."""
    degrees = {"tensor_parallel", "pipeline_parallel", "context_parallel"}
    if axis.name in degrees and degrees <= known:
        others = table.tensor_parallel * table.pipeline_parallel * table.context_parallel
        table = replace(table, data_parallel=np.maximum(space.cluster.num_gpus // others, 1))
        known |= {"data_parallel"}
    if axis.name == "micro_batch_size":
        per_forward = table.micro_batch_size * table.data_parallel
        counts = np.maximum(space.job.global_batch_size // per_forward, 1)
        table = replace(table, num_micro_batches=counts)
        known |= {"num_micro_batches"}
    if axis.name == "zero_group":
        whole = table.data_parallel * table.context_parallel
        inside = domain_group(table, space.cluster)
        is_choice = (table.zero_stage > 0) & (inside > 1) & (inside < whole)
        code = table.zero_group
        group = np.where(code == DOMAIN_GROUP, np.where(is_choice, inside, NO_GROUP), code)
        table = replace(table, zero_group=np.where(code == WHOLE_GROUP, whole, group))
    return table, known


def _legal_rows(broken: dict[str, NDArray[np.bool_]], num_rows: int) -> NDArray[np.bool_]:
    return ~reduce(np.logical_or, broken.values(), np.zeros(num_rows, dtype=np.bool_))


def _merge(
    space: Space, partial: Partial, weight: NDArray[np.int64]
) -> tuple[Partial, NDArray[np.int64]]:
    """Merge rows that no later rule can tell apart."""
    late = [rule for rule in space.rules if not set(rule.reads) <= partial.known]
    needed = {column for rule in late for column in rule.reads} | DERIVE_FROM
    columns = [c for c in COLUMNS if c in needed and c in partial.known]
    if not columns or not len(partial.table):
        return partial, weight
    first, key_of_row = _distinct(partial.table, columns)
    total = np.bincount(key_of_row, weights=weight, minlength=len(first)).astype(np.int64)
    return partial.take(first), total
