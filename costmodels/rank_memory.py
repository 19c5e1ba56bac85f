"""The fullest moment of one pipeline rank of one layout, by part of the allocator's bytes.

Moments, of which the largest counts:

    layers  states + activations in flight + gradients of a layer's backward pass
    loss    states + activations in flight + logits and their gradients
    head    states + activations in flight + gradients of the output matrix
    end     states + activations of other micro-batches + gradients of the embedding
    step    states + what the optimizer needs beside them; no activations

How many micro-batches are in flight is read off the schedule's own table. Where that splits
backwards, what recomputing a layer brought back stays from the input gradient to the weight
gradient, and so does the gradient of the logits, in place of the logits.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from costmodels.block_memory import BlockMemory
from costmodels.job import Optimizer, TrainingJob
from costmodels.layout import Layout, Offload, Recompute
from costmodels.model import ModelSpec
from costmodels.moments import Moment, covered_by_the_one_before
from costmodels.states import BlockStates, bytes_per_weight
from costmodels.targets import BEHAVIOURS
from costmodels.terms import MemoryParts

LAYERS_BEING_MOVED = 2  # offloaded activations: one layer on its way to the host, one at work
FP32_BYTES = 4


def telling_ranks(model: ModelSpec, layout: Layout) -> tuple[int, ...]:
    """Return ranks of which one is the fullest.

    Left out is a rank with the layers of the one before it, neither with embedding nor head, that
    at no moment holds more micro-batches than that one does at some.
    """
    covered = covered_by_the_one_before(layout)
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


def fullest_moment(
    model: ModelSpec,
    job: TrainingJob,
    layout: Layout,
    blocks: BlockMemory,
    *,
    rank: int,
    moments: Sequence[Moment],
) -> tuple[MemoryParts, float]:
    """Return a pipeline rank's parts at the largest of its moments, and the step's own bytes.

    The latter are buckets, and the copies of 16-bit gradients that optimizers make of their shard.
    """
    stages = layout.stages_of_rank(rank)
    held = blocks_of_rank(model, layout, blocks, stages)
    states = _states_of_rank(held, blocks)
    kept = [kept_by_stage(model, layout, blocks, stage) for stage in stages]
    late = sum(count * float(block.late_gradients[0]) for block, count in held)
    step = _step_bytes(job, held)
    found = [_Load(transient=step + late)]
    for moment in moments:
        waiting = _waiting_load(layout, blocks, stages, kept, moment)
        found.append(waiting.plus(transient=_layers_backward(layout, blocks, stages, moment)))
        if layout.num_stages - 1 in stages:
            found += _head_loads(blocks, waiting, moment)
        if 0 in stages and (moment.until_input[0] or moment.put_off[0]):
            found.append(_embedding_load(blocks, waiting, kept[0], moment, late=late))
    fullest = max(found, key=lambda one: one.total)
    parts = replace(
        states,
        parameters=states.parameters - fullest.released,
        activations=fullest.activations,
        logits=fullest.logits,
        transient=fullest.transient,
    )
    return parts, step


class _Load(NamedTuple):
    """What a rank holds at one moment besides its states, and weights that it let go of."""

    transient: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    released: float = 0.0

    @property
    def total(self) -> float:
        return self.activations + self.logits + self.transient - self.released

    def plus(self, *, transient: float, logits: float = 0.0) -> "_Load":
        return self._replace(transient=self.transient + transient, logits=self.logits + logits)


class Kept(NamedTuple):
    """Bytes that one micro-batch keeps in the layers of a stage: until its I or B, and then."""

    until_input: float
    put_off: float


def _waiting_load(
    layout: Layout,
    blocks: BlockMemory,
    stages: Sequence[int],
    kept: Sequence[Kept],
    moment: Moment,
) -> _Load:
    """Return what micro-batches keep that wait; the logits of one are at work, not waiting."""
    activations = 0.0
    for size, waiting, later in zip(kept, moment.until_input, moment.put_off, strict=True):
        activations += waiting * size.until_input + later * size.put_off
    if layout.num_stages - 1 not in stages:
        return _Load(activations=activations)
    head, waiting, later = blocks.head_bytes, moment.until_input[-1], moment.put_off[-1]
    return _Load(
        activations=activations + (waiting + later) * float(head.norm[0]),
        logits=max(waiting - 1, 0) * float(head.saved[0]) + later * float(head.gradient[0]),
    )


def _layers_backward(
    layout: Layout, blocks: BlockMemory, stages: Sequence[int], moment: Moment
) -> float:
    """Return what comes and goes while layers run backward.

    What an I brings back stays, so that it counts with what waits for weight gradients.
    """
    moving = blocks.transients
    brings_back = moment.before_b and _recomputes_whole_stage(layout, stages)
    backward = float((moving.recompute if brings_back else moving.layers)[0])
    has_head = layout.num_stages - 1 in stages
    return backward + (float(moving.after_head[0]) if has_head else 0.0)


def _head_loads(blocks: BlockMemory, waiting: _Load, moment: Moment) -> list[_Load]:
    """Return the moments of loss and head: of a micro-batch at work, or of its put-off part."""
    moving, head, found = blocks.transients, blocks.head_bytes, []
    if moment.until_input[-1]:
        loss, gradient = float(head.peak[0]), float(head.gradient[0])
        found.append(waiting.plus(transient=float(moving.always[0]), logits=loss))
        found.append(waiting.plus(transient=float(moving.head[0]), logits=gradient))
    if moment.put_off[-1]:
        found.append(waiting.plus(transient=float(moving.head_put_off[0])))
    return found


def _embedding_load(
    blocks: BlockMemory, waiting: _Load, kept: Kept, moment: Moment, *, late: float
) -> _Load:
    """Return the moment of the embedding's gradient: the layers' activations are gone."""
    mine = kept.put_off if moment.put_off[0] else kept.until_input
    moving = blocks.transients
    reduced = late - float(blocks.embedding.late_gradients[0])
    return waiting._replace(
        activations=waiting.activations - mine,
        transient=float(moving.embedding[0]) + reduced,
        released=float(moving.released[0]),
    )


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


def kept_by_stage(model: ModelSpec, layout: Layout, blocks: BlockMemory, stage: int) -> Kept:
    """Return what one micro-batch keeps in the layers of a stage; offloading leaves two layers."""
    counts = _layers_of_stage(model, layout, stage)
    redone = 0
    if layout.recompute is Recompute.FULL:
        redone = layout.recompute_layers or sum(counts)
    by_kind = {
        kind.has_experts: size for kind, size in zip(blocks.kinds, blocks.layer_bytes, strict=True)
    }
    kept: list[tuple[float, int]] = []
    put_off = 0.0
    for has_experts, count in zip((False, True), counts, strict=True):
        if count:
            again = min(redone, count)
            redone -= again
            size = by_kind[has_experts]
            kept += [(float(size.recomputed[0]), again), (float(size.kept[0]), count - again)]
            put_off += again * float(size.put_off_again[0])
            put_off += (count - again) * float(size.put_off[0])
    is_last = stage == layout.num_stages - 1
    output = 0.0 if is_last else float(blocks.transients.boundary[0])
    if Offload.ACTIVATIONS in layout.offload:
        each = sorted(size for size, count in kept for _ in range(count))
        held = sum(each[-LAYERS_BEING_MOVED:])
    else:
        held = sum(size * count for size, count in kept)
    return Kept(until_input=held + output, put_off=put_off + output)


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
