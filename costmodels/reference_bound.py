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
from costmodels.layout_table import LayoutTable
from costmodels.model import ModelSpec
from costmodels.schedule import StageDurations, build_schedule, simulate

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A simulated pipeline: seconds of each stage without transfers, and its makespan."""

    schedule: Schedule
    durations: Values
    makespan: float


def reference_of(model: ModelSpec, layout: Layout, costs: LayoutCosts) -> Reference:
    """Simulate a layout's schedule without transfers, with the even split of its layers.

    Args:
        model: The network.
        layout: A legal layout in a pipeline.
        costs: Of the layout alone.

    """
    redone = np.array([recomputed_layers(model, layout)])
    durations = _durations(model, costs, np.array([0]), redone, layout.num_stages)[0]
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


def recomputed_layers(model: ModelSpec, layout: Layout) -> int:
    """Return layers per stage that a layout recomputes in full, at most."""
    if layout.recompute is not Recompute.FULL:
        return 0
    return layout.recompute_layers or model.num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceBound:
    """Bounds of a table's layouts with their even split.

    Attributes:
        once: Seconds per step besides the pipeline, at their least, one entry per layout.
        stretch: Factor on everything.

    """

    model: ModelSpec
    costs: LayoutCosts
    once: Values
    stretch: float

    def seconds(
        self,
        rows: NDArray[np.int64],
        num_stages: int,
        recomputed: Values,
        references: tuple[Reference, ...],
    ) -> Values:
        """Return seconds that layouts of one shape do not go below.

        Args:
            rows: Those with the references' schedule, ranks, stages and micro-batches.
            num_stages: Of that shape, over all ranks.
            recomputed: Layers that each stage recomputes in full, at least, one entry per row.
            references: Simulated pipelines of that shape, at least one.

        """
        durations = _durations(
            self.model, self.costs, rows, recomputed.astype(np.int64), num_stages
        )
        compared = _compared(durations, references[0].schedule)
        makespans = [
            (compared / reference.durations).min(axis=(1, 2)) * reference.makespan
            for reference in references
        ]
        bound: Values = (np.maximum.reduce(makespans) + self.once[rows]) * self.stretch
        return bound


def reference_bound(
    model: ModelSpec, job: TrainingJob, cluster: Cluster, table: LayoutTable
) -> ReferenceBound:
    """Return the bounds of a table's layouts, of any shapes.

    Args:
        model: The network.
        job: What is trained per step.
        cluster: The machine.
        table: Layouts, at least one.

    """
    costs = layout_costs(model, job, cluster, table)
    once, stretch = around_rows(model, job, cluster, table, costs)
    return ReferenceBound(model=model, costs=costs, once=once, stretch=stretch)


def _durations(
    model: ModelSpec,
    costs: LayoutCosts,
    rows: NDArray[np.int64],
    recomputed: NDArray[np.int64],
    num_stages: int,
) -> Values:
    """Return forward, backward_input and backward_weight of each stage: [rows, 3, stages]."""
    kinds = [kind for kind, _ in costs.layers]
    of_layer = [kinds.index(kind) for kind in model.layer_kinds]
    phases = np.stack([[t.forward, t.backward_input, t.backward_weight] for _, t in costs.layers])[
        :, :, rows
    ]  # [kinds, phases, rows]
    again = np.stack([times.recompute for _, times in costs.layers])[:, rows]
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
        ends = np.stack([block.forward, block.backward_input, block.backward_weight], axis=1)[rows]
        durations[:, :, stage] += ends
    return durations


def _compared(durations: Values, schedule: Schedule) -> Values:
    """Return what a schedule's makespan depends on: it may run both halves of backward as one."""
    if schedule is not Schedule.INTERLEAVED:
        return durations
    whole = durations[:, 1] + durations[:, 2]
    return np.stack([durations[:, 0], whole], axis=1)
