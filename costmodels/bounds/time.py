"""Lower bounds of a layout's step time and memory, for a whole table at once.

Both hold for every way to split the layers over stages (at least one layer per stage, whole
layers, model order) and for every `recompute_layers` of at least 1. They use the block costs of
the exact estimate, so only three things are given up:

    pipeline   `makespan_lower_bound`: sums over all stages, and what each partition must have
    rest       the slowest rank's once-per-step work is at least that of the average rank. What is
               exposed is convex in (communication, hidden_by), so by Jensen's inequality it is at
               least what the average rank would expose
    recompute  under full recomputation, one layer per stage, the cheapest kind; but on one stage
               the rest is hidden by a backward that recomputes everything

The last part in 10^9 is given away, so that rounding never lifts a bound over its exact value.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from costmodels.bounds.pipeline import (
    BlockTotals,
    SplitLimits,
    block_totals,
    blocks_of,
    no_limits,
    pipeline_lower_bound,
    pipeline_sums,
)
from costmodels.hardware import Cluster
from costmodels.job import TrainingJob
from costmodels.layout import AXES, Recompute, Schedule
from costmodels.layout_table import RECOMPUTES, SCHEDULES, LayoutTable
from costmodels.memory.states import ZERO_2
from costmodels.model import LayerKind, ModelSpec
from costmodels.time.collectives import exposed_seconds
from costmodels.time.estimate import stragglers
from costmodels.time.layouts import (
    FULL_CODE,
    LayoutCosts,
    layout_costs,
    rank_state_seconds,
)
from costmodels.time.overlap import overlap_of, passes_beside

Values = NDArray[np.float64]

_ROUNDING = 1 - 1e-9
_ANY_SCHEDULE = -1  # no position in SCHEDULES: only what holds for every schedule


def time_lower_bound(
    model: ModelSpec,
    job: TrainingJob,
    cluster: Cluster,
    table: LayoutTable,
    limits: SplitLimits | None = None,
    *,
    costs: LayoutCosts | None = None,
) -> Values:
    """Return seconds that no partition of the layers goes below, one entry per layout.

    Args:
        model: The network.
        job: What is trained per step.
        cluster: The machine.
        table: Layouts that the rules allow.
        limits: What is known of the partitions; None knows nothing.
        costs: Of the table's blocks, where they are known.

    """
    limits = limits or no_limits(table)
    if costs is None:
        costs = layout_costs(model, job, cluster, table)
    counts = {kind: model.layer_kinds.count(kind) for kind, _ in costs.layers}
    totals = block_totals(costs, counts)
    sums = pipeline_sums(costs, counts, totals, table, limits)
    pipeline = pipeline_lower_bound(costs, counts, sums, table, limits)
    rest = _rest(job, costs, counts, totals, table)
    overhead = cluster.profile.calibration["step_overhead"]
    bound: Values = (pipeline + rest + overhead) * (1 + stragglers(cluster)) * _ROUNDING
    return bound


def open_lower_bound(
    model: ModelSpec,
    job: TrainingJob,
    cluster: Cluster,
    table: LayoutTable,
    *,
    schedule_is_open: bool,
    limits: SplitLimits | None = None,
) -> Values:
    """Return seconds that no completion of partial layouts goes below.

    Open are the ZeRO stage and group, the rank order, recomputation and offload, so nothing is
    gathered, recomputed or done once per step, no transfer takes time, and the context axis lies
    as close as it can.

    Args:
        model: The network.
        job: What is trained per step.
        cluster: The machine.
        table: Degrees, micro-batches, sequence and context choices decided.
        schedule_is_open: The schedule and the stages per rank are open too; any keeps the slowest
            rank busy and passes one micro-batch through every stage.
        limits: What is known of every completion that counts; `recomputed` 0 recomputes nothing.

    """
    limits = limits or replace(no_limits(table), recomputed=np.zeros(len(table)))
    zeros = np.zeros(len(table), dtype=np.int64)
    closed = replace(
        table,
        rank_orders=(AXES,),
        rank_order=zeros,
        zero_stage=zeros,
        recompute=np.where(limits.recomputed > 0, FULL_CODE, RECOMPUTES.index(Recompute.NONE)),
        offload_optimizer=zeros,
        offload_parameters=zeros,
        offload_activations=zeros,
    )
    costs = layout_costs(model, job, cluster, closed)
    counts = {kind: model.layer_kinds.count(kind) for kind, _ in costs.layers}
    if schedule_is_open:
        closed = replace(closed, schedule=np.full(len(table), _ANY_SCHEDULE))
    sums = pipeline_sums(costs, counts, block_totals(costs, counts), closed, limits)
    nothing = np.zeros(len(table))
    sums = replace(sums, way=nothing, way_ahead=nothing, way_round=nothing)
    pipeline = pipeline_lower_bound(costs, counts, sums, closed, limits)
    overhead = cluster.profile.calibration["step_overhead"]
    bound: Values = (pipeline + overhead) * (1 + stragglers(cluster)) * _ROUNDING
    return bound


def around_rows(
    model: ModelSpec, job: TrainingJob, cluster: Cluster, table: LayoutTable, costs: LayoutCosts
) -> tuple[Values, float]:
    """Return what every split of each layout adds to its pipeline, at its least.

    Returns:
        `once` and `stretch`: step >= (makespan + once) * stretch.

    """
    counts = {kind: model.layer_kinds.count(kind) for kind, _ in costs.layers}
    rest = _rest(job, costs, counts, block_totals(costs, counts), table)
    once = rest + cluster.profile.calibration["step_overhead"]
    return once, (1 + stragglers(cluster)) * _ROUNDING


def _rest(
    job: TrainingJob,
    costs: LayoutCosts,
    counts: dict[LayerKind, int],
    totals: BlockTotals,
    table: LayoutTable,
) -> Values:
    """Return what the average rank does once per step, at its best hidden."""
    overlap = overlap_of(job)
    parts = [
        [n * part for part in rank_state_seconds(costs.states, times.weights)]
        for n, times in blocks_of(costs, counts)
    ]
    p = table.pipeline_parallel
    reduce, gather, update = (np.asarray(sum(column)) / p for column in zip(*parts, strict=True))
    backward = totals.backward_input + totals.backward_weight
    redoes = (table.recompute == FULL_CODE) & (p == 1)  # see `stages.rank_rest`
    backward = backward + np.where(redoes, totals.recompute, 0.0)
    interleaved = table.schedule == SCHEDULES.index(Schedule.INTERLEAVED)
    passes = passes_beside(
        np.where(interleaved, table.stages_per_rank, 1), p, table.num_micro_batches
    )
    each = overlap.reduces_each_micro_batch & (table.zero_stage == ZERO_2)
    backward = backward * np.where(each, table.num_micro_batches, passes)
    if overlap.grad_reduce:
        waits = overlap.reduces_after_pipeline & (p > 1)
        reduce = np.where(waits, reduce, exposed_seconds(reduce, backward / p, costs.rates))
    if overlap.param_gather:
        gather = exposed_seconds(gather, totals.forward * passes / p, costs.rates)
    rest: Values = reduce + gather + update
    return rest
