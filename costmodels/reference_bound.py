"""Bounds from a pipeline that was simulated already.

A makespan is a maximum of sums of durations, so it never falls when durations rise, and doubles
when all double. If every duration of a layout is at least x times that of a simulated one of the
same shape, its makespan is at least x times as long. Layouts of one shape differ in placement,
sharding and offload, so their durations are close and the bound is tight, at the price of a few
array operations for many layouts instead of a simulation for each.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodels.bounds import around_rows
from costmodels.hardware import Cluster
from costmodels.job import TrainingJob
from costmodels.layout import Layout, Recompute, Schedule, split_layers
from costmodels.layout_costs import LayoutCosts, layout_costs
from costmodels.layout_table import LayoutTable, table_of
from costmodels.model import ModelSpec
from costmodels.schedule import StageDurations, build_schedule, simulate

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A simulated pipeline: seconds of each stage without transfers, and its makespan."""

    schedule: Schedule
    durations: Values
    makespan: float


def reference_of(model: ModelSpec, job: TrainingJob, cluster: Cluster, layout: Layout) -> Reference:
    """Simulate a layout's schedule without transfers, with the even split of its layers.

    Args:
        model: The network.
        job: What is trained per step.
        cluster: The machine.
        layout: A legal layout in a pipeline.

    """
    table = table_of([layout])
    costs = layout_costs(model, job, cluster, table)
    redone = 0
    if layout.recompute is Recompute.FULL:
        redone = layout.recompute_layers or model.num_layers
    durations = _durations(model, costs, np.array([redone]), layout.num_stages)[0]
    forward, to_input, to_weight = (tuple(part.tolist()) for part in durations)
    actions = build_schedule(
        layout.schedule,
        layout.pipeline_parallel,
        layout.stages_per_rank,
        layout.num_micro_batches,
    )
    result = simulate(
        actions,
        StageDurations(forward=forward, backward_input=to_input, backward_weight=to_weight),
    )
    return Reference(
        schedule=layout.schedule,
        durations=_compared(durations[None], layout.schedule)[0],
        makespan=result.makespan,
    )


def reference_bound(
    model: ModelSpec,
    job: TrainingJob,
    cluster: Cluster,
    table: LayoutTable,
    *,
    recomputed: Values,
    references: tuple[Reference, ...],
) -> Values:
    """Return seconds that layouts of one shape do not go below with their even split.

    Args:
        model: The network.
        job: What is trained per step.
        cluster: The machine.
        table: Layouts with the same schedule, ranks, stages and micro-batches, at least one.
        recomputed: Layers that each stage recomputes in full, at least.
        references: Simulated pipelines of that shape, at least one.

    """
    costs = layout_costs(model, job, cluster, table)
    stages = int(table.pipeline_parallel[0] * table.stages_per_rank[0])
    durations = _durations(model, costs, recomputed.astype(np.int64), stages)
    compared = _compared(durations, references[0].schedule)
    makespans = [
        (compared / reference.durations).min(axis=(1, 2)) * reference.makespan
        for reference in references
    ]
    once, stretch = around_rows(model, job, cluster, table, costs)
    bound: Values = (np.maximum.reduce(makespans) + once) * stretch
    return bound


def _durations(
    model: ModelSpec, costs: LayoutCosts, recomputed: NDArray[np.int64], num_stages: int
) -> Values:
    """Return forward, backward_input and backward_weight of each stage: [rows, 3, stages]."""
    kinds = [kind for kind, _ in costs.layers]
    of_layer = [kinds.index(kind) for kind in model.layer_kinds]
    phases = np.stack(
        [[t.forward, t.backward_input, t.backward_weight] for _, t in costs.layers]
    )  # [kinds, phases, rows]
    again = np.stack([times.recompute for _, times in costs.layers])
    durations = np.zeros((phases.shape[2], 3, num_stages))
    first = 0
    for stage, size in enumerate(split_layers(model.num_layers, num_stages)):
        held = np.array(of_layer[first : first + size])
        first += size
        counts = np.bincount(held, minlength=len(kinds))
        durations[:, :, stage] = np.einsum("k,kpr->rp", counts, phases)
        ahead = np.cumsum(held[:, None] == np.arange(len(kinds)), axis=0)
        ahead = np.concatenate([np.zeros((1, len(kinds)), dtype=np.int64), ahead])
        redone = ahead[np.minimum(recomputed, size)]  # [rows, kinds]
        durations[:, 1, stage] += np.einsum("rk,kr->r", redone, again)
    for stage, block in ((0, costs.embedding), (-1, costs.head)):
        ends = np.stack([block.forward, block.backward_input, block.backward_weight], axis=1)
        durations[:, :, stage] += ends
    return durations


def _compared(durations: Values, schedule: Schedule) -> Values:
    """Return what a schedule's makespan depends on: it may run both halves of backward as one."""
    if schedule is not Schedule.INTERLEAVED:
        return durations
    whole = durations[:, 1] + durations[:, 2]
    return np.stack([durations[:, 0], whole], axis=1)
