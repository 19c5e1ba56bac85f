"""What waits for weight gradients where backwards are split: a bound for whole tables.

Between its input gradient and its weight gradient a micro-batch keeps operands of products, in
recomputed layers too, for which recomputation brought them back. A moment with many of those is in
every step of m micro-batches (p ranks, rank r, v stages per rank, rounds of R; stages x
micro-batches):

    schedule      when                               put off          until the input gradient
    zero-bubble   after I of turn r                  min(r + 1, v m)  (v - 1) R + p - 1 - r
                  before it, with enough of m        r                (v - 1) R + p - r
    zbv           first I0 behind the pairs (I0 I1)  2 r + 1          p - 1 - r
                  first I1                           1                2 p - 1
    dualpipev     end of phase 6                     r + 1            p - 1 - r

zero-bubble holds no more of the latter than it has left, zbv of neither where the micro-batches end
before 2 p - 1. Tables: `schedule/looped.py`, `schedule/v_shaped.py`.

With one stage per rank a weighted mean of the ranks bounds every partition, as in
`memory.py`. One more recomputed layer per stage gives back what it keeps until the input
gradient and no more, so that the same moments say how many must be recomputed to fit.
"""

from dataclasses import dataclass, fields, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from costmodels.bounds.memory import block_bytes, count_layers
from costmodels.bounds.stage_sizes import SmallestStages, smallest_stages
from costmodels.hardware import Cluster
from costmodels.job import TrainingJob
from costmodels.layout import Recompute, Schedule
from costmodels.layout_table import RECOMPUTES, SCHEDULES, IntColumn, LayoutTable, distinct
from costmodels.memory.blocks import block_memory
from costmodels.memory.framework import growth
from costmodels.memory.rank_blocks import least_by_rank
from costmodels.model import ModelSpec

Column = NDArray[np.float64]

_ROUNDING = 1 - 1e-9  # given away, so that rounding never lifts a bound over its exact value


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOff:
    """What waits for weight gradients, one entry per layout.

    All is 0 where nothing is known: without split backwards, and where activations go to the host.

    Attributes:
        bound: Bytes of reserved memory that no partition goes below; under full recomputation
            whatever the number of recomputed layers.
        least: Layers per stage that must be recomputed in full to fit a limit, at least.

    """

    bound: Column
    least: Column


def put_off(
    model: ModelSpec,
    job: TrainingJob,
    cluster: Cluster,
    table: LayoutTable,
    *,
    limit: float = inf,
    known_splits: bool = False,
) -> PutOff:
    """Return what put-off weight gradients take and what recomputation must give back then.

    Args:
        model: The network.
        job: What is trained per step.
        cluster: The machine.
        table: Layouts that the rules allow.
        limit: Bytes that a rank may reserve; `least` is 0 without one.
        known_splits: With several stages per rank, only the row's own split counts.

    """
    bound, least = np.zeros(len(table)), np.zeros(len(table))
    known = np.flatnonzero((table.offload_activations == 0) & table.puts_off)
    if len(known):
        layers = _layers_of(model, job, cluster, table.take(known), limit)
        pipelines = layers.table.pipeline_parallel
        for pipeline in distinct(pipelines).tolist():
            rows = np.flatnonzero(pipelines == pipeline)
            few = smallest_stages(model, layers.table, rows, known_splits=known_splits)
            found = _of_pipeline(layers.take(rows), few, limit)
            bound[known[rows]], least[known[rows]] = found
    return PutOff(bound=bound * _ROUNDING, least=least)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layers:
    """Bytes of layouts whose backwards are split: one row each; of layers, one column per kind.

    Attributes:
        counts: Layers of each kind.
        whole: Of a layer per micro-batch until its input gradient, nothing recomputed.
        kept: The same under the layout's own recomputation.
        later: Between input and weight gradient, at least.
        states: Of a layer.
        besides: Beside layers and their states, while a layer of each kind runs backward.
        boundary: Output of a stage but the last, per micro-batch.
        embedding: States before the first layer.
        head: States after the last layer.

    """

    table: LayoutTable
    counts: IntColumn
    whole: Column
    kept: Column
    later: Column
    states: Column
    besides: Column
    boundary: Column
    embedding: Column
    head: Column

    def take(self, rows: NDArray[np.int64]) -> "_Layers":
        """Return some rows."""
        names = [f.name for f in fields(self) if f.name not in {"table", "counts"}]
        columns = {name: getattr(self, name)[rows] for name in names}
        return replace(self, table=self.table.take(rows), **columns)


def _layers_of(
    model: ModelSpec, job: TrainingJob, cluster: Cluster, table: LayoutTable, limit: float
) -> _Layers:
    blocks = block_memory(model, job, cluster, table)
    costs = block_bytes(job, cluster, table, blocks, brings_back=False, limit=limit)
    grown = growth(job, cluster, limit)
    is_full = (table.recompute == RECOMPUTES.index(Recompute.FULL))[:, None]
    whole, put_off, again, redone = (
        np.stack([getattr(layer, part) for layer in blocks.layer_bytes], axis=1) * grown
        for part in ("kept", "put_off", "put_off_again", "recomputed")
    )
    return _Layers(
        table=table,
        counts=np.array([count_layers(model, kind.has_experts) for kind in blocks.kinds]),
        whole=whole,
        kept=np.where(is_full, redone, whole),
        later=np.where(is_full, np.minimum(put_off, again), put_off),
        states=costs.states,
        besides=costs.layer_moment[0],
        boundary=costs.boundary,
        embedding=costs.embedding,
        head=costs.head,
    )


def _of_pipeline(layers: _Layers, few: SmallestStages, limit: float) -> tuple[Column, Column]:
    """Return both for layouts that share their number of pipeline ranks."""
    table, counts = layers.table, layers.counts
    main = int(np.argmax(counts))
    is_one = table.stages_per_rank == 1
    gain = (layers.whole - layers.kept).max(axis=1)[:, None]
    besides, output = _outside_layers(layers)
    states = few.rank.hold(layers.states, main)
    bounds, least = [], [np.zeros(len(table))]
    for until_input, until_weight in _moments(table, besides.shape[1]):
        outside = besides + (until_input + until_weight) * output
        fixed = outside + states + until_weight * few.stage.hold(layers.later, main)
        bounds.append((fixed + until_input * few.stage.hold(layers.kept, main)).max(axis=1))
        missing = fixed + until_input * few.stage.hold(layers.whole, main) - limit
        least.append(_layers_to(missing, until_input * gain).max(axis=1))
        of_layer = layers.states[:, None] + until_weight[:, :, None] * layers.later[:, None]
        least_kept = of_layer + until_input[:, :, None] * layers.kept[:, None]
        bounds.append(np.where(is_one, _weighted_mean(least_kept, outside, counts)[0], 0.0))
        nothing = of_layer + until_input[:, :, None] * layers.whole[:, None]
        mean, weights = _weighted_mean(nothing, outside, counts)
        given_back = (weights * until_input * gain).sum(axis=1)
        least.append(np.where(is_one, _layers_to(mean - limit, given_back), 0.0))
    return np.maximum.reduce(bounds), np.maximum.reduce(least)


def _layers_to(missing: Column, gain: Column) -> Column:
    """Return how many layers give back what is missing; 0 where they give back nothing."""
    return np.where(gain > 0, np.ceil(missing / np.maximum(gain, 1.0) - 1e-9), 0.0)


def _outside_layers(layers: _Layers) -> tuple[Column, Column]:
    """Return a rank's bytes without layers, and its stages' outputs per micro-batch."""
    table = layers.table
    pipeline, row = int(table.pipeline_parallel[0]), np.arange(len(table))
    last = np.where(table.is_v_shaped, 0, pipeline - 1)
    output = np.repeat(layers.boundary[:, None], pipeline, axis=1)
    output[row, last] = 0  # of the last stage it is the logits
    besides = least_by_rank(layers.besides, int(layers.counts[:-1].sum()), pipeline)
    besides[:, 0] += layers.embedding
    besides[row, last] += layers.head
    return besides, output


def _weighted_mean(of_layer: Column, besides: Column, counts: IntColumn) -> tuple[Column, Column]:
    """Return what no partition's fullest rank goes below, as in `memory_bound`, and the weights.

    Args:
        of_layer: Bytes of one layer: [rows, ranks, kinds].
        besides: Bytes of a rank without layers: [rows, ranks].
        counts: Layers of each kind.

    """
    weights = 1 / np.maximum(of_layer @ counts, 1.0)  # any weights do; on the host a layer has none
    weights /= weights.sum(axis=1, keepdims=True)
    layers = (weights[:, :, None] * of_layer).min(axis=1) @ counts
    mean: Column = layers + (weights * besides).sum(axis=1)
    return mean, weights


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
    enough = is_looped & (stages * m >= ahead + 1 + rank)
    return (
        (np.where(is_zbv, left, waiting), np.where(is_zbv, down + up, put_off)),
        (
            np.where(is_zbv, begun, np.where(enough, ahead + 1, 0)),
            np.where(is_zbv, 1, np.where(enough, rank, 0)),
        ),
    )
