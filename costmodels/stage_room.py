"""How many layers the fullest rank holds in every partition that fits, for whole tables.

A rank has room for so many layers only; what does not go there goes elsewhere. With room c_r on
rank r, the fullest holds at least the t at which sum over r of min(c_r, t) reaches the number of
layers. Early ranks of 1F1B hold more micro-batches, so their room is less: this is what ties the
time of a pipeline to its memory.

Recomputing k layers of each stage makes room for more: a stage of n layers with f micro-batches
in flight holds n * states + f * (n * kept - min(k, n) * (kept - recomputed)).
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from costmodels.block_memory import block_memory
from costmodels.hardware import Cluster
from costmodels.job import TrainingJob
from costmodels.layout import Recompute
from costmodels.layout_table import RECOMPUTES, LayoutTable
from costmodels.memory_bound import BlockBytes, block_bytes, count_layers, held_micro_batches
from costmodels.model import ModelSpec
from costmodels.recompute_bound import with_recompute

Column = NDArray[np.float64]

_SELECTIVE = RECOMPUTES.index(Recompute.SELECTIVE)
_SLACK = 1e-9  # of a layer, given away to rounding


def fullest_stage(
    model: ModelSpec,
    job: TrainingJob,
    cluster: Cluster,
    table: LayoutTable,
    *,
    limit: float,
    recomputed: Column,
) -> Column:
    """Return layers of the main kind that some rank holds in every partition that fits, at least.

    Args:
        model: The network; the main kind (with experts or without) is that of most of its layers.
        job: What is trained per step.
        cluster: The machine.
        table: Layouts that the rules allow; their full recomputation is not read.
        limit: Bytes that a rank may reserve.
        recomputed: Layers that each stage recomputes in full, at most.

    Returns:
        Whole layers; inf where no partition fits. With several stages per rank, the mean.

    """
    kept = _bytes(model, job, cluster, table, None)
    again = _bytes(model, job, cluster, table, Recompute.FULL)
    blocks = block_memory(model, job, cluster, table.take(np.arange(min(1, len(table)))))
    kinds = [(count_layers(model, kind.has_experts), not kind.has_experts) for kind in blocks.kinds]
    main = kinds.index(max(kinds))
    num_layers = kinds[main][0]
    fullest = np.ceil(num_layers / table.pipeline_parallel)
    for pipeline in np.unique(table.pipeline_parallel[table.stages_per_rank == 1]):
        alike = (table.pipeline_parallel == pipeline) & (table.stages_per_rank == 1)
        rows = np.flatnonzero(alike)
        in_flight, _ = held_micro_batches(table, rows, np.arange(pipeline)[None, :])
        besides = _besides(kept, rows, in_flight)
        states = kept.states[rows, main][:, None]
        of_kept = in_flight * kept.kept[rows, main][:, None]
        of_again = in_flight * again.kept[rows, main][:, None]
        free, k = np.maximum(limit - besides, 0.0), recomputed[rows][:, None]
        some = (free + k * (of_kept - of_again)) / (states + of_kept)
        every = free / (states + of_again)
        room = np.floor(np.where(some >= k, some, np.minimum(every, k)) + _SLACK)
        fullest[rows] = _level(room, num_layers)
    return fullest


def _bytes(
    model: ModelSpec,
    job: TrainingJob,
    cluster: Cluster,
    table: LayoutTable,
    recompute: Recompute | None,
) -> BlockBytes:
    """Return the blocks of layouts; layers that are recomputed in full otherwise are kept."""
    if recompute is None:
        selective = table.recompute == _SELECTIVE
        table = with_recompute(table, Recompute.NONE)
        table = replace(table, recompute=np.where(selective, _SELECTIVE, table.recompute))
    else:
        table = with_recompute(table, recompute)
    return block_bytes(job, cluster, table, block_memory(model, job, cluster, table))


def _besides(kept: BlockBytes, rows: NDArray[np.int64], in_flight: Column) -> Column:
    """Return what each rank holds besides its layers: [rows, ranks]."""
    besides = np.repeat(kept.layer_moment[rows][:, None], in_flight.shape[1], axis=1)
    besides[:, 0] += kept.embedding[rows]
    besides[:, -1] += kept.head[rows] + in_flight[:, -1] * kept.head_kept[rows]
    return besides


def _level(room: Column, num_layers: int) -> Column:
    """Return the smallest whole t at which ranks filled up to t hold all layers; inf: none."""
    pipeline = room.shape[1]
    ascending = np.sort(room, axis=1)
    held = np.concatenate([np.zeros((len(room), 1)), ascending.cumsum(axis=1)], axis=1)
    left = (num_layers - held[:, :-1]) / (pipeline - np.arange(pipeline))
    level = np.ceil(left.max(axis=1) - _SLACK)
    return np.where(held[:, -1] >= num_layers, level, np.inf)
