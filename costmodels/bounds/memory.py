"""A lower bound of a layout's memory over every partition of its layers, for whole tables.

The fullest rank is at least as full as any weighted mean of the ranks. With weights that make each
layer cost the same wherever it lies (the reciprocal of its bytes there), the mean does not depend
on the partition:

    bound = sum over kinds of  num_layers_k * min over ranks r of  w_r * (state_k + f_r * kept_k)
            + sum over ranks of  w_r * (what the rank holds besides)

f_r is the fewest micro-batches that a stage of rank r holds at the rank's fullest moment; stages of
the rank that hold more hold them for one layer at least. Under full recomputation every layer is
taken as recomputed, which is the least: a layer that is not keeps at least what recomputing
another brings back. The ranks of the first and the last stage are bounded by themselves too, with
the smallest stages that the caller considers (`smallest_stage`, one layer where it says nothing).
"""

from dataclasses import dataclass, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from costmodels.bounds.stage_sizes import SmallestStages, smallest_stages
from costmodels.hardware import Cluster
from costmodels.job import TrainingJob
from costmodels.layout import Recompute
from costmodels.layout_table import RECOMPUTES, LayoutTable, distinct, is_one_of
from costmodels.memory.blocks import BlockMemory, block_memory
from costmodels.memory.framework import context_bytes, growth
from costmodels.memory.rank_blocks import least_by_rank
from costmodels.memory.states import BlockStates
from costmodels.memory.transients import MANY_LAYERS
from costmodels.memory.weight_bytes import copies_at_step
from costmodels.model import ModelSpec
from costmodels.schedule import in_flight_closed_form
from costmodels.schedule.shape import IN_ROUNDS
from costmodels.targets import BEHAVIOURS

Column = NDArray[np.float64]

_ROUNDING = 1 - 1e-9  # given away, so that rounding never lifts a bound over its exact value


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBytes:
    """Reserved bytes of some layouts' blocks, one row per layout.

    Attributes:
        states: Of a layer, one column per kind.
        kept: The least per micro-batch in flight of a layer, one column per kind.
        embedding: States before the first layer.
        head: States after the last layer.
        head_kept: Per micro-batch in flight, input and output of the final norm.
        logits_kept: The least per micro-batch that waits on the last stage.
        boundary: Per micro-batch in flight of a stage but the last, its output.
        head_moment: While loss or head run, all beside layers and states.
        layer_moment: While a layer runs backward, all beside layers and states, one column per
            kind; one entry per layers of its stage: one, two, or more.
        at_step: Of a layer at the optimizer step, one column per kind.
        ends_at_step: Of embedding and head then, and of what every rank holds.

    """

    states: Column
    kept: Column
    embedding: Column
    head: Column
    head_kept: Column
    logits_kept: Column
    boundary: Column
    head_moment: Column
    layer_moment: tuple[Column, ...]
    at_step: Column
    ends_at_step: Column


def memory_lower_bound(
    model: ModelSpec,
    job: TrainingJob,
    cluster: Cluster,
    table: LayoutTable,
    *,
    known_splits: bool = False,
    any_recompute: bool = False,
    limit: float = inf,
) -> NDArray[np.float64]:
    """Return bytes of reserved memory that no partition of a layout's layers goes below.

    Args:
        model: The network.
        job: What is trained per step.
        cluster: The machine.
        table: Layouts that the rules allow.
        known_splits: With several stages per rank, only the row's own split counts.
        any_recompute: Hold whatever is recomputed: layers keep what they keep in full
            recomputation, and none is brought back.
        limit: Bytes that a rank may reserve. The bound is above it only where no partition stays
            within it, and tells that of more layouts than a bound without a limit.

    """
    if any_recompute:
        full = RECOMPUTES.index(Recompute.FULL)
        table = replace(table, recompute=np.full(len(table), full))
    blocks = block_memory(model, job, cluster, table)
    costs = block_bytes(job, cluster, table, blocks, brings_back=not any_recompute, limit=limit)
    counts = np.array([count_layers(model, kind.has_experts) for kind in blocks.kinds])
    bound = np.zeros(len(table))
    for pipeline in distinct(table.pipeline_parallel):
        rows = np.flatnonzero(table.pipeline_parallel == pipeline)
        few = smallest_stages(model, table, rows, known_splits=known_splits)
        bound[rows] = _bound_of(costs, counts, table, rows, few)
    return bound * _ROUNDING


def count_layers(model: ModelSpec, has_experts: bool) -> int:
    """Return how many layers have experts, or have none."""
    return sum(kind.has_experts == has_experts for kind in model.layer_kinds)


def block_bytes(
    job: TrainingJob,
    cluster: Cluster,
    table: LayoutTable,
    blocks: BlockMemory,
    *,
    brings_back: bool = True,
    limit: float = inf,
) -> BlockBytes:
    """Return the reserved bytes of blocks; under full recomputation every layer is recomputed.

    A layer that is recomputed brings back what it did not keep, which may be left out. With a
    limit, bytes are those that decide what stays within it (`framework_memory.growth`).
    """
    grown = growth(job, cluster, limit)
    is_full = table.recompute == RECOMPUTES.index(Recompute.FULL)
    stays = grown * (table.offload_activations == 0)
    moving = blocks.transients
    kept = [
        np.where(is_full, layer.recomputed, layer.waiting) * stays for layer in blocks.layer_bytes
    ]
    extra = [layer.waiting - layer.recomputed for layer in blocks.layer_bytes]
    brought_back = np.where(is_full & brings_back, np.minimum.reduce(extra), 0.0) * (stays > 0)
    outside = context_bytes(cluster) + job.memory_taken + blocks.communication
    logits = blocks.head_bytes
    last = [np.where(is_full, layer.recomputed, layer.kept) for layer in blocks.layer_bytes]
    released = np.maximum.reduce(last) * stays
    beside = outside + moving.whole_ends
    layer_moment = tuple(
        np.stack(
            [
                beside
                + layer.least_of_stage(
                    count, grown=grown, released=released, brought_back=grown * brought_back
                )
                for layer in moving.layers
            ],
            axis=1,
        )
        for count in range(1, MANY_LAYERS + 1)
    )
    copies = copies_at_step(job)

    def at_step(block: BlockStates) -> Column:
        return block.total + grown * (copies * block.optimizer + block.late_gradients)

    buckets = grown * BEHAVIOURS[job.target].bucket_bytes
    return BlockBytes(
        at_step=np.stack([at_step(states) for states in blocks.layer_states], axis=1),
        ends_at_step=np.stack(
            [at_step(blocks.embedding), at_step(blocks.head), outside + buckets], axis=1
        ),
        states=np.stack([states.total for states in blocks.layer_states], axis=1),
        kept=np.stack(kept, axis=1),
        embedding=blocks.embedding.total,
        head=blocks.head.total,
        head_kept=logits.norm * grown,
        logits_kept=logits.waiting * grown,
        boundary=moving.boundary * grown,
        head_moment=outside
        + moving.whole_ends
        + moving.whole_head
        + grown * (blocks.head_transient + logits.saved),
        layer_moment=layer_moment,
    )


def _bound_of(
    costs: BlockBytes,
    counts: NDArray[np.int64],
    table: LayoutTable,
    rows: NDArray[np.int64],
    few: SmallestStages,
) -> Column:
    """Return the bound of rows that share their number of pipeline ranks."""
    pipeline = int(table.pipeline_parallel[rows[0]])
    ranks = np.arange(pipeline)[None, :]
    fewest, total = held_micro_batches(table, rows, ranks)
    kept, states = costs.kept[rows], costs.states[rows]
    mean_states, mean_kept = states @ counts / counts.sum(), kept @ counts / counts.sum()
    # Any weights do; a layer may have no bytes where all its states are on the host.
    weights = 1 / np.maximum(mean_states[:, None] + fewest * mean_kept[:, None], 1.0)
    weights /= weights.sum(axis=1, keepdims=True)
    by_rank = weights[:, :, None] * (states[:, None, :] + fewest[:, :, None] * kept[:, None, :])
    layers = by_rank.min(axis=1) @ counts
    chunks = table.stages_per_rank[rows][:, None]
    main = int(np.argmax(counts))
    lightest = few.stage.hold(kept, main)  # of a stage, per micro-batch
    leading = int(counts[:-1].sum())
    moments = [least_by_rank(moment[rows], leading, pipeline) for moment in costs.layer_moment]
    of_size = np.minimum(few.stage.layers, MANY_LAYERS).astype(np.int64) - 1
    besides = np.choose(of_size, moments)
    many = moments[-1] - besides  # what stages of many layers have more
    besides += (total - chunks * fewest) * lightest
    besides[:, 0] += costs.embedding[rows]
    last = np.where(table.is_v_shaped[rows], 0, pipeline - 1)
    row = np.arange(len(rows))
    # Looped schedules run the head in the fullest moment of the last rank; of the others it is
    # only known that the head runs while it holds one micro-batch.
    outputs = costs.boundary[rows][:, None] * total
    outputs[row, last] = 0
    besides += outputs
    waiting = fewest[row, last]
    saved = np.maximum(waiting - 1, 0) * costs.logits_kept[rows]
    ends = costs.head[rows] + saved
    besides[row, last] += ends + waiting * costs.head_kept[rows]
    mean = layers + (weights * besides).sum(axis=1)
    # Stages of one or two layers have less. Where that many fit below the bound with what others
    # have, such a stage is no rank's fullest, and the bound holds as if all had many.
    of_many = layers + (weights * (besides + many)).sum(axis=1)
    largest = (states[:, None, :] + fewest[:, :, None] * kept[:, None, :]).max(axis=2)
    is_free = np.all(2 * largest + besides + many < of_many[:, None], axis=1) & (chunks[:, 0] == 1)
    mean = np.where(is_free, of_many, mean)
    held = np.where(waiting > 0, total[row, last], 1)
    of_layers = few.rank.hold(states, main)
    beside_head = of_layers[row, last] + held * lightest[row, last]
    kept_by_head = np.maximum(waiting, 1) * costs.head_kept[rows]
    alone = ends + kept_by_head + costs.head_moment[rows] + beside_head
    # Each rank alone, with the smallest stages that the caller considers.
    smallest = of_layers + fewest * few.rank.hold(kept, main)
    step = _at_step(costs, counts, rows, pipeline)
    bound: Column = np.maximum.reduce([mean, alone, step, (besides + smallest).max(axis=1)])
    return bound


def _at_step(
    costs: BlockBytes, counts: NDArray[np.int64], rows: NDArray[np.int64], pipeline: int
) -> Column:
    """Return what some rank holds at the optimizer step: the mean, or its share of main layers.

    No rank that holds the most layers of a kind holds less than the mean number, rounded up.
    """
    layers, (embedding, head, everywhere) = costs.at_step[rows], costs.ends_at_step[rows].T
    mean = (layers @ counts + embedding + head) / pipeline
    longest: Column = (np.ceil(counts / pipeline) * layers).max(axis=1)
    return np.asarray(everywhere + np.maximum(mean, longest))


def held_micro_batches(
    table: LayoutTable, rows: NDArray[np.int64], ranks: NDArray[np.int64]
) -> tuple[Column, Column]:
    """Return micro-batches in flight: the fewest of a rank's stages, and their sum.

    With one stage per rank both are the same. At the end of its warm-up a rank of a looped schedule
    holds the first forwards of its order, whole rounds stage by stage; of a V only the sum is used.
    """
    schedule, chunks = table.schedule[rows][:, None], table.stages_per_rank[rows][:, None]
    micro_batches = table.num_micro_batches[rows][:, None]
    pipeline = table.pipeline_parallel[rows][:, None]
    total = in_flight_closed_form(schedule, pipeline, chunks, micro_batches, ranks)
    total = np.broadcast_to(total, (len(rows), ranks.shape[1]))
    in_round = micro_batches // np.maximum(1, micro_batches // pipeline)
    cycles, rest = np.divmod(total, chunks * in_round)
    interleaved = cycles * in_round + np.maximum(0, rest - (chunks - 1) * in_round)
    in_rounds = is_one_of(schedule, *IN_ROUNDS)
    fewest = np.where(chunks == 1, total, np.where(in_rounds, interleaved, 0))
    return fewest.astype(np.float64), total.astype(np.float64)
