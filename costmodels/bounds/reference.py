"""Bounds from a pipeline that was simulated already.

A makespan is the length of the longest path through its schedule's event graph, so no path is
longer than it. The critical path of a simulated layout is a path of every other one of the same
shape: its length under their own durations and transfers bounds their makespan. Layouts of one
shape differ in placement, sharding and offload, so that the path is nearly critical for them too
and the bound tight, at the price of a few array operations for many layouts instead of a simulation
for each.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from costmodels.bounds.time import around_rows
from costmodels.hardware import Cluster
from costmodels.job import TrainingJob
from costmodels.layout import Layout, Recompute
from costmodels.layout_table import LayoutTable
from costmodels.model import ModelSpec
from costmodels.schedule import PipelineShape, StageDurations
from costmodels.schedule.build import table_of_shape
from costmodels.schedule.critical_path import CriticalPath, critical_path
from costmodels.time.layouts import LayoutCosts, layout_costs
from costmodels.time.overlap import sends_hold_rank
from costmodels.virtual_splits import Split

Values = NDArray[np.float64]


def reference_of(
    model: ModelSpec, job: TrainingJob, layout: Layout, costs: LayoutCosts
) -> CriticalPath:
    """Simulate a layout's schedule.

    Args:
        model: The network.
        job: For whether transfers hold ranks.
        layout: A legal layout in a pipeline, with its split.
        costs: Of the layout alone.

    """
    shape = PipelineShape.of(layout)
    redone = np.array([recomputed_layers(model, layout)])
    split = layout.layers_per_stage
    durations = _durations(model, costs, np.array([0]), redone, split)[0]
    forward, to_input, to_weight = (tuple(part.tolist()) for part in durations)
    return critical_path(
        table_of_shape(shape),
        StageDurations(forward=forward, backward_input=to_input, backward_weight=to_weight),
        _transfers(costs, np.array([0]), shape.rank_of_stage)[0].tolist(),
        p2p_overlaps=not sends_hold_rank(job, layout.schedule),
    )


def recomputed_layers(model: ModelSpec, layout: Layout) -> int:
    """Return layers per stage that a layout recomputes in full, at most."""
    if layout.recompute is not Recompute.FULL:
        return 0
    return layout.recompute_layers or model.num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceBound:
    """Bounds of a table's layouts with a split that is known.

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
        rank_of_stage: tuple[int, ...],
        split: Split,
        recomputed: Values,
        references: tuple[CriticalPath, ...],
    ) -> Values:
        """Return seconds that layouts of one shape do not go below with a split.

        Args:
            rows: Those with the references' schedule, ranks, stages and micro-batches.
            rank_of_stage: Of that shape.
            split: Layers of its stages.
            recomputed: Layers that each stage recomputes in full, at least, one entry per row.
            references: Critical paths of pipelines of that shape, at least one.

        """
        redone = recomputed.astype(np.int64)
        durations = _durations(self.model, self.costs, rows, redone, split)
        transfers = _transfers(self.costs, rows, rank_of_stage)
        makespans = [path.seconds(durations, transfers) for path in references]
        bound: Values = (np.maximum.reduce(makespans) + self.once[rows]) * self.stretch
        return bound


def reference_bound(
    model: ModelSpec,
    job: TrainingJob,
    cluster: Cluster,
    table: LayoutTable,
    *,
    costs: LayoutCosts | None = None,
) -> ReferenceBound:
    """Return the bounds of a table's layouts, of any shapes.

    Args:
        model: The network.
        job: What is trained per step.
        cluster: The machine.
        table: Layouts, at least one.
        costs: Of their blocks, where they are known.

    """
    if costs is None:
        costs = layout_costs(model, job, cluster, table)
    once, stretch = around_rows(model, job, cluster, table, costs)
    return ReferenceBound(model=model, costs=costs, once=once, stretch=stretch)


def _durations(
    model: ModelSpec,
    costs: LayoutCosts,
    rows: NDArray[np.int64],
    recomputed: NDArray[np.int64],
    split: Split,
) -> Values:
    """Return forward, backward_input and backward_weight of each stage: [rows, 3, stages]."""
    kinds = [kind for kind, _ in costs.layers]
    phases = np.stack([[t.forward, t.backward_input, t.backward_weight] for _, t in costs.layers])[
        :, :, rows
    ]  # [kinds, phases, rows]
    again = np.stack([times.recompute for _, times in costs.layers])[:, rows]
    first = _first_layers(tuple(map(kinds.index, model.layer_kinds)), split)
    durations: Values = np.einsum("sk,kpr->rps", first[:, -1], phases)
    redone = first[:, np.minimum(recomputed, first.shape[1] - 1)]  # [stages, rows, kinds]
    durations[:, 1] += np.einsum("srk,kr->rs", redone, again)
    for stage, block in ((0, costs.embedding), (-1, costs.head)):
        ends = np.stack([block.forward, block.backward_input, block.backward_weight], axis=1)[rows]
        durations[:, :, stage] += ends
    return durations


@lru_cache(maxsize=256)
def _first_layers(kind_of_layer: tuple[int, ...], split: Split) -> NDArray[np.int64]:
    """Return layers by kind among the first of each stage's: [stages, largest stage + 1, kinds]."""
    counts = np.zeros((len(split), max(split) + 1, max(kind_of_layer) + 1), dtype=np.int64)
    layers = iter(kind_of_layer)
    for stage, size in enumerate(split):
        for place, kind in enumerate(islice(layers, size), start=1):
            counts[stage, place, kind] = 1
    counts = counts.cumsum(axis=1)
    counts.flags.writeable = False
    return counts


def _transfers(
    costs: LayoutCosts, rows: NDArray[np.int64], rank_of_stage: tuple[int, ...]
) -> Values:
    """Return seconds of a transfer across each stage boundary: [rows, stages - 1]."""
    ranks, hops = np.array(rank_of_stage), costs.hops
    domain = ranks // hops.domain_ranks[rows, None]
    near, far = hops.near[rows, None], hops.far[rows, None]
    crossed = np.where(domain[:, :-1] == domain[:, 1:], near, far)
    return np.where(ranks[:-1] == ranks[1:], 0.0, crossed)
