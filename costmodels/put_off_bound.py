"""What full recomputation cannot give back where backwards are split: a bound for whole tables.

Between its input gradient and its weight gradient a micro-batch keeps what recomputation brought
back, in every layer of its stage. A moment with many of those is in every step of m micro-batches
(p ranks, rank r, v stages per rank, rounds of R; stages x micro-batches):

    schedule      when                               put off          until the input gradient
    zero-bubble   after I of turn r                  min(r + 1, v m)  (v - 1) R + p - 1 - r
    zbv           first I0 behind the pairs (I0 I1)  2 r + 1          p - 1 - r
                  first I1                           1                2 p - 1
    dualpipev     end of phase 6                     r + 1            p - 1 - r

zero-bubble holds no more of the latter than it has left, zbv of neither where the micro-batches end
before 2 p - 1. Tables: `schedule/looped.py`, `schedule/v_shaped.py`. With one stage per rank a
weighted mean of the ranks bounds every partition, as in `memory_bound.py`.
"""

import numpy as np
from numpy.typing import NDArray

from costmodels.block_memory import block_memory
from costmodels.framework_memory import fragmentation_fraction
from costmodels.hardware import Cluster
from costmodels.job import TrainingJob
from costmodels.layout import Recompute, Schedule
from costmodels.layout_table import RECOMPUTES, SCHEDULES, IntColumn, LayoutTable, distinct
from costmodels.memory_bound import block_bytes, count_layers
from costmodels.model import ModelSpec
from costmodels.stage_sizes import V_SHAPED, smallest_stages

Column = NDArray[np.float64]

_ROUNDING = 1 - 1e-9  # given away, so that rounding never lifts a bound over its exact value


def put_off_lower_bound(
    model: ModelSpec,
    job: TrainingJob,
    cluster: Cluster,
    table: LayoutTable,
    *,
    even_chunks: bool = False,
) -> Column:
    """Return bytes of reserved memory that no number of recomputed layers goes below.

    0 where nothing is known: without full recomputation, without split backwards, and where
    activations go to the host.

    Args:
        model: The network.
        job: What is trained per step.
        cluster: The machine.
        table: Layouts that the rules allow.
        even_chunks: With several stages per rank, only the even split (`split_layers`) counts.

    """
    bound = np.zeros(len(table))
    is_full = table.recompute == RECOMPUTES.index(Recompute.FULL)
    stays = (table.offload_activations == 0) & (table.pipeline_parallel > 1)
    known = np.flatnonzero(is_full & stays & table.puts_off)
    for pipeline in distinct(table.pipeline_parallel[known]).tolist():
        rows = known[table.pipeline_parallel[known] == pipeline]
        bound[rows] = _bound_of(model, job, cluster, table.take(rows), even_chunks=even_chunks)
    return bound * _ROUNDING


def _bound_of(
    model: ModelSpec, job: TrainingJob, cluster: Cluster, table: LayoutTable, *, even_chunks: bool
) -> Column:
    """Return the bound of layouts that share their number of pipeline ranks."""
    blocks = block_memory(model, job, cluster, table)
    costs = block_bytes(job, cluster, table, blocks, brings_back=False)
    few = smallest_stages(model, table, np.arange(len(table)), even_chunks=even_chunks)
    counts = np.array([count_layers(model, kind.has_experts) for kind in blocks.kinds])
    main = int(np.argmax(counts))
    grown = 1 + fragmentation_fraction(job, cluster)
    each = [np.minimum(layer.put_off, layer.put_off_again) for layer in blocks.layer_bytes]
    put_off = np.stack(each, axis=1) * grown
    pipeline, row = int(table.pipeline_parallel[0]), np.arange(len(table))
    last = np.where(np.isin(table.schedule, V_SHAPED), 0, pipeline - 1)
    output = np.repeat(costs.boundary[:, None], pipeline, axis=1)
    output[row, last] = 0  # of the last stage it is the logits
    besides = np.repeat(costs.layer_moment[:, None], pipeline, axis=1)
    besides[:, 0] += costs.embedding
    besides[row, last] += costs.head
    states = table.stages_per_rank[:, None] * few.least(costs.states, main)
    waits, later = few.least(costs.kept, main), few.least(put_off, main)
    bounds = []
    for until_input, until_weight in _moments(table, pipeline):
        outside = besides + (until_input + until_weight) * output
        bounds.append((outside + states + until_input * waits + until_weight * later).max(axis=1))
        of_layer = costs.states[:, None] + until_input[:, :, None] * costs.kept[:, None]
        of_layer = of_layer + until_weight[:, :, None] * put_off[:, None]
        mean = _weighted_mean(of_layer, outside, counts)
        bounds.append(np.where(table.stages_per_rank == 1, mean, 0.0))
    return np.asarray(np.maximum.reduce(bounds))


def _weighted_mean(of_layer: Column, besides: Column, counts: IntColumn) -> Column:
    """Return what no partition's fullest rank goes below, as in `memory_bound`.

    Args:
        of_layer: Bytes of one layer: [rows, ranks, kinds].
        besides: Bytes of a rank without layers: [rows, ranks].
        counts: Layers of each kind.

    """
    weights = 1 / (of_layer @ counts)
    weights /= weights.sum(axis=1, keepdims=True)
    layers = (weights[:, :, None] * of_layer).min(axis=1) @ counts
    mean: Column = layers + (weights * besides).sum(axis=1)
    return mean


def _moments(table: LayoutTable, pipeline: int) -> tuple[tuple[IntColumn, IntColumn], ...]:
    """Return moments: what waits for the input gradient, what for the weight's: [rows, ranks]."""
    rank = np.arange(pipeline)[None, :]
    schedule, m = table.schedule[:, None], table.num_micro_batches[:, None]
    stages = table.stages_per_rank[:, None]
    is_looped = schedule == SCHEDULES.index(Schedule.ZERO_BUBBLE)
    is_zbv = schedule == SCHEDULES.index(Schedule.ZBV)
    round_size = m // np.maximum(1, m // pipeline)
    ahead = np.where(stages > 1, (stages - 1) * round_size, 0) + pipeline - 1 - rank
    put_off = np.where(is_looped, np.minimum(rank + 1, stages * m), rank + 1)
    waiting = np.where(is_looped, np.minimum(ahead, stages * m - put_off), pipeline - 1 - rank)
    # The table of zbv is that of 2 p - 1 micro-batches, without those that are missing.
    down = np.clip(m - (pipeline - 1), 0, rank + 1)
    up = np.clip(m - (2 * pipeline - 1 - rank), 0, rank)
    left = np.clip(m - (pipeline + rank), 0, pipeline - 1 - rank)
    begun = np.minimum(m, 2 * pipeline - 1 - rank) + np.minimum(rank + 1, m) - 1
    return (
        (np.where(is_zbv, left, waiting), np.where(is_zbv, down + up, put_off)),
        (np.where(is_zbv, begun, 0), np.where(is_zbv, 1, 0)),
    )
