"""How many layers the fullest rank holds in every partition that fits, for whole tables.

A rank has room for so many layers only; what does not go there goes elsewhere. With room c_r on
rank r, the fullest holds at least the t at which sum over r of min(c_r, t) reaches the number of
layers. Early ranks of 1F1B hold more micro-batches, so their room is less: this is what ties the
time of a pipeline to its memory.

Recomputing k layers of each stage makes room for more: a stage of n layers with f micro-batches
in flight holds n * states + f * (n * kept - min(k, n) * (kept - recomputed)).
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from costmodels.bounds.memory import BlockBytes, block_bytes, count_layers, held_micro_batches
from costmodels.bounds.pipeline import most_have_experts
from costmodels.bounds.recompute import with_recompute
from costmodels.hardware import Cluster
from costmodels.job import TrainingJob
from costmodels.layout import Recompute
from costmodels.layout_table import RECOMPUTES, LayoutTable, distinct
from costmodels.memory.blocks import block_memory
from costmodels.memory.rank_blocks import least_by_rank, num_leading_layers
from costmodels.memory.transients import MANY_LAYERS
from costmodels.model import ModelSpec

Column = NDArray[np.float64]

_SELECTIVE = RECOMPUTES.index(Recompute.SELECTIVE)
_SLACK = 1e-9  # of a layer, given away to rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomGroup:
    """Rows with one stage per rank and the same number of ranks; arrays of shape [rows, ranks].

    Attributes:
        rows: Positions in the table.
        free: Bytes that a rank has for layers of the main kind, where they are many.
        free_of_few: The same where they are one or two, which meet less while they run backward.
        states: Of one such layer; [rows, 1].
        kept: Of its micro-batches in flight, kept whole.
        recomputed: The same where it is recomputed in full.

    """

    rows: NDArray[np.int64]
    free: Column
    free_of_few: Column
    states: Column
    kept: Column
    recomputed: Column

    def room(self, most_recomputed: Column) -> Column:
        """Return whole layers that fit each rank, with at most so many of them recomputed."""
        few = np.minimum(self._room(self.free_of_few, most_recomputed), MANY_LAYERS - 1)
        room: Column = np.maximum(self._room(self.free, most_recomputed), few)
        return room

    def _room(self, free: Column, most_recomputed: Column) -> Column:
        k = most_recomputed[:, None]
        some = (free + k * (self.kept - self.recomputed)) / (self.states + self.kept)
        every = free / (self.states + self.recomputed)
        room: Column = np.floor(np.where(some >= k, some, np.minimum(every, k)) + _SLACK)
        return room


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRooms:
    """The room of a table's ranks.

    Attributes:
        num_layers: Layers of the main kind.
        mean: Such layers on the average rank, in whole layers, one entry per layout.

    """

    num_layers: int
    mean: Column
    groups: tuple[RoomGroup, ...]

    def fullest(self, most_recomputed: Column) -> Column:
        """Return layers of the main kind that some rank holds in every partition that fits.

        Whole layers; inf where no partition fits. With several stages per rank, the mean.

        Args:
            most_recomputed: Layers that each stage recomputes in full, at most.

        """
        fullest = self.mean.copy()
        for group in self.groups:
            fullest[group.rows] = _level(group.room(most_recomputed[group.rows]), self.num_layers)
        return fullest


def stage_rooms(
    model: ModelSpec, job: TrainingJob, cluster: Cluster, table: LayoutTable, *, limit: float
) -> StageRooms:
    """Return what the ranks of every layout have room for.

    Args:
        model: The network; the main kind (with experts or without) is that of most of its layers.
        job: What is trained per step.
        cluster: The machine.
        table: Layouts that the rules allow, at least one; their full recomputation is not read.
        limit: Bytes that a rank may reserve.

    """
    kept = _bytes(model, job, cluster, table, None, limit=limit)
    again = _bytes(model, job, cluster, table, Recompute.FULL, limit=limit)
    blocks = block_memory(model, job, cluster, table.take(np.arange(1)))
    with_experts = most_have_experts(Counter(model.layer_kinds))
    main = [kind.has_experts for kind in blocks.kinds].index(with_experts)
    besides = partial(_besides, kept, num_leading_layers(model))
    groups = []
    for pipeline in distinct(table.pipeline_parallel[table.stages_per_rank == 1]):
        alike = (table.pipeline_parallel == pipeline) & (table.stages_per_rank == 1)
        rows = np.flatnonzero(alike)
        in_flight, _ = held_micro_batches(table, rows, np.arange(pipeline)[None, :])
        groups.append(
            RoomGroup(
                rows=rows,
                free=np.maximum(limit - besides(rows, in_flight, MANY_LAYERS), 0.0),
                free_of_few=np.maximum(limit - besides(rows, in_flight, 1), 0.0),
                states=kept.states[rows, main][:, None],
                kept=in_flight * kept.kept[rows, main][:, None],
                recomputed=in_flight * again.kept[rows, main][:, None],
            )
        )
    num_layers = count_layers(model, with_experts)
    return StageRooms(
        num_layers=num_layers,
        mean=np.ceil(num_layers / table.pipeline_parallel),
        groups=tuple(groups),
    )


def _bytes(
    model: ModelSpec,
    job: TrainingJob,
    cluster: Cluster,
    table: LayoutTable,
    recompute: Recompute | None,
    *,
    limit: float,
) -> BlockBytes:
    """Return the blocks of layouts; layers that are recomputed in full otherwise are kept."""
    if recompute is None:
        selective = table.recompute == _SELECTIVE
        table = with_recompute(table, Recompute.NONE)
        table = replace(table, recompute=np.where(selective, _SELECTIVE, table.recompute))
    else:
        table = with_recompute(table, recompute)
    blocks = block_memory(model, job, cluster, table)
    return block_bytes(job, cluster, table, blocks, limit=limit)


def _besides(
    kept: BlockBytes, leading: int, rows: NDArray[np.int64], in_flight: Column, num_layers: int
) -> Column:
    """Return what each rank holds besides its layers, so many at least: [rows, ranks]."""
    moment = kept.layer_moment[num_layers - 1][rows]
    besides = least_by_rank(moment, leading, in_flight.shape[1])
    besides[:, :-1] += in_flight[:, :-1] * kept.boundary[rows][:, None]
    besides[:, 0] += kept.embedding[rows]
    last = in_flight[:, -1]
    besides[:, -1] = np.maximum(besides[:, -1], kept.head_moment[rows]) + kept.head[rows]
    besides[:, -1] += last * kept.head_kept[rows]
    besides[:, -1] += np.maximum(last - 1, 0) * kept.logits_kept[rows]
    return besides


def _level(room: Column, num_layers: int) -> Column:
    """Return the smallest whole t at which ranks filled up to t hold all layers; inf: none."""
    pipeline = room.shape[1]
    ascending = np.sort(room, axis=1)
    held = np.concatenate([np.zeros((len(room), 1)), ascending.cumsum(axis=1)], axis=1)
    left = (num_layers - held[:, :-1]) / (pipeline - np.arange(pipeline))
    level = np.ceil(left.max(axis=1) - _SLACK)
    return np.where(held[:, -1] >= num_layers, level, np.inf)
