"""The fullest moment of one pipeline rank of one layout, by part of the allocator's bytes.

Moments, of which the largest counts:

    layers  states + activations in flight + gradients of a layer's backward pass
    loss    states + activations in flight + logits and their gradients
    head    states + activations in flight + gradients of the output matrix
    end     states + activations of other micro-batches + gradients of the embedding
    step    states + what the optimizer needs beside them; no activations

How many micro-batches are in flight is read off the schedule's own table.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from costmodels.block_memory import BlockMemory
from costmodels.job import Optimizer, TrainingJob
from costmodels.layout import Layout, Offload, Recompute, Schedule
from costmodels.model import ModelSpec
from costmodels.schedule import held_moments
from costmodels.states import BlockStates, bytes_per_weight
from costmodels.targets import BEHAVIOURS
from costmodels.terms import MemoryParts

Moments = tuple[tuple[int, ...], ...]

LAYERS_BEING_MOVED = 2  # offloaded activations: one layer on its way to the host, one at work
FP32_BYTES = 4


def rank_moments(layout: Layout) -> tuple[Moments, ...]:
    """Return, per pipeline rank, the moments that may be its fullest.

    A moment tells how many micro-batches each of the rank's stages holds, in model order; moments
    that hold no more than another in any stage are left out.
    """
    return _moments_of_shape(
        layout.schedule,
        layout.pipeline_parallel,
        layout.stages_per_rank,
        layout.num_micro_batches,
    )


@lru_cache(maxsize=1024)
def _moments_of_shape(
    schedule: Schedule, pipeline_parallel: int, stages_per_rank: int, num_micro_batches: int
) -> tuple[Moments, ...]:
    """Layouts of one shape share their moments, and a search asks for many of a shape."""
    held = held_moments(schedule, pipeline_parallel, stages_per_rank, num_micro_batches)
    return tuple(_maximal(moments.until_weight) for moments in held)


def _maximal(rows: NDArray[np.int64]) -> Moments:
    """Return the rows that no other row exceeds everywhere."""
    kept = np.empty_like(rows)
    number = 0
    for row in rows[np.argsort(-rows.sum(axis=1), kind="stable")]:
        if not (row <= kept[:number]).all(axis=1).any():
            kept[number] = row
            number += 1
    return tuple(tuple(row) for row in kept[:number].tolist())


def telling_ranks(model: ModelSpec, layout: Layout) -> tuple[int, ...]:
    """Return ranks of which one is the fullest.

    Left out is a rank with the layers of the one before it, neither with embedding nor head, that
    at no moment holds more micro-batches than that one does at some.
    """
    covered = _covered_by_the_one_before(
        layout.schedule,
        layout.pipeline_parallel,
        layout.stages_per_rank,
        layout.num_micro_batches,
    )
    sizes = [
        [_layers_of_stage(model, layout, stage) for stage in layout.stages_of_rank(rank)]
        for rank in range(layout.pipeline_parallel)
    ]
    last = layout.pipeline_parallel - 1
    return tuple(
        rank
        for rank in range(layout.pipeline_parallel)
        if not (1 < rank < last and covered[rank] and sizes[rank] == sizes[rank - 1])
    )


@lru_cache(maxsize=1024)
def _covered_by_the_one_before(
    schedule: Schedule, pipeline_parallel: int, stages_per_rank: int, num_micro_batches: int
) -> tuple[bool, ...]:
    moments = _moments_of_shape(schedule, pipeline_parallel, stages_per_rank, num_micro_batches)
    arrays = [np.array(of_rank) for of_rank in moments]

    def covers(before: NDArray[np.int64], mine: NDArray[np.int64]) -> bool:
        is_less = np.all(mine[:, None] <= before, axis=2)
        return bool(np.all(np.any(is_less, axis=1)))

    return (False, *(covers(before, mine) for before, mine in pairwise(arrays)))


def fullest_moment(
    model: ModelSpec,
    job: TrainingJob,
    layout: Layout,
    blocks: BlockMemory,
    *,
    rank: int,
    moments: Moments,
) -> tuple[MemoryParts, float]:
    """Return a pipeline rank's parts at the largest of its moments, and the step's own bytes.

    The latter are buckets, and the copies of 16-bit gradients that optimizers make of their shard.
    """
    stages = layout.stages_of_rank(rank)
    held = blocks_of_rank(model, layout, blocks, stages)
    states = _states_of_rank(held, blocks)
    per_micro_batch = [kept_by_stage(model, layout, blocks, stage) for stage in stages]
    moving, logits = blocks.transients, blocks.head_bytes
    saved, norm = float(logits.saved[0]), float(logits.norm[0])
    backward = float(
        (moving.recompute if _recomputes_whole_stage(layout, stages) else moving.layers)[0]
    )
    has_head = layout.num_stages - 1 in stages
    if has_head:
        backward += float(moving.after_head[0])
    late = sum(count * float(block.late_gradients[0]) for block, count in held)
    step = _step_bytes(job, held)
    found = [_Moment(transient=step + late)]
    for moment in moments:
        kept = sum(count * size for count, size in zip(moment, per_micro_batch, strict=True))
        waiting = moment[-1] if has_head else 0
        activations = kept + waiting * norm
        behind = max(waiting - 1, 0) * saved
        found.append(_Moment(activations=activations, logits=behind, transient=backward))
        if waiting:
            loss, gradient = float(logits.peak[0]), float(logits.gradient[0])
            always, head = float(moving.always[0]), float(moving.head[0])
            found += [
                _Moment(activations=activations, logits=behind + loss, transient=always),
                _Moment(activations=activations, logits=behind + gradient, transient=head),
            ]
        if 0 in stages and moment[0]:
            reduced = late - float(blocks.embedding.late_gradients[0])
            found.append(
                _Moment(
                    activations=activations - per_micro_batch[0],
                    logits=behind,
                    transient=float(moving.embedding[0]) + reduced,
                    released=float(moving.released[0]),
                )
            )
    fullest = max(found, key=lambda one: one.total)
    parts = replace(
        states,
        parameters=states.parameters - fullest.released,
        activations=fullest.activations,
        logits=fullest.logits,
        transient=fullest.transient,
    )
    return parts, step


class _Moment(NamedTuple):
    """What a rank holds at one moment besides its states, and weights that it let go of."""

    transient: float
    activations: float = 0.0
    logits: float = 0.0
    released: float = 0.0

    @property
    def total(self) -> float:
        return self.activations + self.logits + self.transient - self.released


def _layers_of_stage(model: ModelSpec, layout: Layout, stage: int) -> tuple[int, int]:
    """Return how many layers of a global stage have no experts, and how many have.

    Layers without experts lead the network, so they lead their stage.
    """
    first, count = sum(layout.layers_per_stage[:stage]), layout.layers_per_stage[stage]
    dense = model.num_layers if model.moe is None else model.moe.num_dense_layers
    plain = min(max(dense - first, 0), count)
    return plain, count - plain


def _states_of_rank(held: list[tuple[BlockStates, int]], blocks: BlockMemory) -> MemoryParts:
    """Return parameters, gradients and optimizer states of a rank's blocks."""

    def total(part: str) -> float:
        return sum(count * float(getattr(block, part)[0]) for block, count in held)

    return MemoryParts(
        parameters=total("parameters") + float(blocks.transients.gathered[0]),
        gradients=total("gradients"),
        optimizer=total("optimizer"),
    )


def blocks_of_rank(
    model: ModelSpec, layout: Layout, blocks: BlockMemory, stages: Sequence[int]
) -> list[tuple[BlockStates, int]]:
    """Return the blocks of a rank's stages and how often it holds each."""
    by_stage = [_layers_of_stage(model, layout, stage) for stage in stages]
    plain, experts = (sum(of_kind) for of_kind in zip(*by_stage, strict=True))
    held = [
        (states, experts if kind.has_experts else plain)
        for kind, states in zip(blocks.kinds, blocks.layer_states, strict=True)
    ]
    held.append((blocks.embedding, int(0 in stages)))
    held.append((blocks.head, int(layout.num_stages - 1 in stages)))
    return held


def kept_by_stage(model: ModelSpec, layout: Layout, blocks: BlockMemory, stage: int) -> float:
    """Return what one micro-batch keeps in the layers of a stage; offloading leaves two layers."""
    counts = _layers_of_stage(model, layout, stage)
    redone = 0
    if layout.recompute is Recompute.FULL:
        redone = layout.recompute_layers or sum(counts)
    by_kind = {
        kind.has_experts: size for kind, size in zip(blocks.kinds, blocks.layer_bytes, strict=True)
    }
    kept: list[tuple[float, int]] = []
    for has_experts, count in zip((False, True), counts, strict=True):
        if count:
            again = min(redone, count)
            redone -= again
            size = by_kind[has_experts]
            kept += [(float(size.recomputed[0]), again), (float(size.kept[0]), count - again)]
    is_last = stage == layout.num_stages - 1
    output = 0.0 if is_last else float(blocks.transients.boundary[0])
    if Offload.ACTIVATIONS in layout.offload:
        each = sorted(size for size, count in kept for _ in range(count))
        return sum(each[-LAYERS_BEING_MOVED:]) + output
    return sum(size * count for size, count in kept) + output


def _recomputes_whole_stage(layout: Layout, stages: Sequence[int]) -> bool:
    """Whether a stage keeps inputs only, so that a layer's activations come back on top."""
    if layout.recompute is not Recompute.FULL:
        return False
    counts = [layout.layers_per_stage[stage] for stage in stages]
    return any(0 < count <= (layout.recompute_layers or count) for count in counts)


def _step_bytes(job: TrainingJob, held: list[tuple[BlockStates, int]]) -> float:
    """Return buckets, and the copies of 16-bit gradients that optimizers make of their shard."""
    per_weight, behaviour = bytes_per_weight(job), BEHAVIOURS[job.target]
    copies = behaviour.step_bytes if per_weight.gradient < FP32_BYTES else 0
    master = per_weight.working if job.optimizer is Optimizer.ADAMW_BF16 else FP32_BYTES
    if behaviour.casts_to_master and master != per_weight.gradient:
        copies = master
    if not per_weight.optimizer:
        return behaviour.bucket_bytes
    states = sum(count * float(block.optimizer[0]) for block, count in held)
    return states / per_weight.optimizer * copies + behaviour.bucket_bytes
