"""The fullest moment of one pipeline rank of one layout, by part of the allocator's bytes.

Moments, of which the largest counts:

    layers  states + activations in flight + gradients of a layer's backward pass: of the last layer
            of a stage, or of the one before it with those of the last layer on their way
    loss    states + activations in flight + logits and their gradients
    head    states + activations in flight + gradients of the output matrix
    end     states + activations of other micro-batches + gradients of the embedding
    step    states + what the optimizer needs beside them; no activations

Weights that ZeRO-3 gathers are whole where they are needed: of the unit at work and of the next.

How many micro-batches are in flight is read off the schedule's own table. Where that splits
backwards, what recomputing a layer brought back stays from the input gradient to the weight
gradient, and so does the gradient of the logits, in place of the logits.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from costmodels.job import TrainingJob
from costmodels.layout import Layout, Recompute
from costmodels.memory.blocks import BlockMemory
from costmodels.memory.moments import Moment, covered_by_the_one_before
from costmodels.memory.rank_blocks import Kept, blocks_of_rank, kept_by_stage, layers_by_kind
from costmodels.memory.states import BlockStates
from costmodels.memory.transients import LayerTransients
from costmodels.memory.weight_bytes import copies_at_step
from costmodels.model import ModelSpec
from costmodels.targets import BEHAVIOURS
from costmodels.terms import MemoryParts


def telling_ranks(model: ModelSpec, layout: Layout) -> tuple[int, ...]:
    """Return ranks of which one is the fullest.

    Left out is a rank with the layers of the one before it, neither with embedding nor head, that
    at no moment holds more micro-batches than that one does at some.
    """
    covered = covered_by_the_one_before(layout)
    sizes = [
        [layers_by_kind(model, layout, stage) for stage in layout.stages_of_rank(rank)]
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
    grown: float,
) -> tuple[MemoryParts, float]:
    """Return a pipeline rank's parts at the largest of its moments, and the step's own bytes.

    The latter are buckets, and the copies of 16-bit gradients that optimizers make of their shard.
    What comes and goes reserves `grown` bytes per byte, weights that are gathered one.
    """
    stages = layout.stages_of_rank(rank)
    held = blocks_of_rank(model, layout, blocks, stages)
    states = _states_of_rank(held)
    kept = [kept_by_stage(model, layout, blocks, stage) for stage in stages]
    late = sum(count * float(block.late_gradients[0]) for block, count in held)
    step = _step_bytes(job, held)
    found = [_Load(transient=step + late)]
    for moment in moments:
        waiting = _waiting_load(layout, blocks, stages, kept, moment)
        found += _layer_loads(model, layout, blocks, stages, kept, waiting=waiting, moment=moment)
        if layout.num_stages - 1 in stages:
            found += _head_loads(blocks, waiting, moment)
        if 0 in stages and (moment.until_input[0] or moment.put_off[0]):
            found.append(_embedding_load(blocks, waiting, kept[0], moment, late=late))
    fullest = max(found, key=lambda one: one.gathered + grown * one.comes_and_goes)
    parts = replace(
        states,
        parameters=states.parameters + fullest.gathered,
        activations=fullest.activations,
        logits=fullest.logits,
        transient=fullest.transient,
    )
    return parts, step


class _Load(NamedTuple):
    """What a rank holds at one moment besides its states; gathered weights apart."""

    transient: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    gathered: float = 0.0

    @property
    def comes_and_goes(self) -> float:
        return self.activations + self.logits + self.transient

    def plus(self, *, transient: float, gathered: float, logits: float = 0.0) -> "_Load":
        return self._replace(
            transient=self.transient + transient,
            logits=self.logits + logits,
            gathered=gathered,
        )


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


def _layer_loads(
    model: ModelSpec,
    layout: Layout,
    blocks: BlockMemory,
    stages: Sequence[int],
    kept: Sequence[Kept],
    *,
    waiting: _Load,
    moment: Moment,
) -> list[_Load]:
    """Return the moments of the layers of each stage of which a micro-batch is about to go."""
    found = []
    for place, stage in enumerate(stages):
        if not layout.layers_per_stage[stage]:
            continue
        has_input = moment.until_input[place] > 0
        if moment.before_b and has_input:
            found += _loads_of_stage(model, layout, blocks, stage, kept[place], waiting=waiting)
        elif moment.before_i and has_input:
            stays = max(0.0, kept[place].put_off - kept[place].until_input)
            begun = waiting._replace(activations=waiting.activations + stays)
            found.append(_load_of_input_half(model, layout, blocks, stage, begun))
        elif moment.put_off[place]:
            found.append(_load_of_weight_half(model, layout, blocks, stage, waiting))
    return found


def _loads_of_stage(
    model: ModelSpec,
    layout: Layout,
    blocks: BlockMemory,
    stage: int,
    kept: Kept,
    *,
    waiting: _Load,
) -> list[_Load]:
    """Return the moments of a stage's last layer, of the one before it, and of the first one.

    The last one meets all activations and what is left of the head, the others those of the layers
    before them and gradients of the layer behind them. The first one meets the embedding's weights.
    """
    moving, count = blocks.transients, layout.layers_per_stage[stage]
    of_layer = _layer_of_stage(model, layout, blocks, stage)
    redone = 0
    if layout.recompute is Recompute.FULL:
        redone = layout.recompute_layers or count
    embedding = float(moving.whole_embedding[0]) if stage == 0 else 0.0
    layer, after_layer = float(of_layer.whole[0]), float(of_layer.behind[0])
    after_head = float(moving.after_head[0]) if stage == layout.num_stages - 1 else 0.0

    def load(place: int, *, behind: float, released: float = 0.0) -> _Load:
        """Of the layer at a place from 1 in the stage."""
        back = float((of_layer.brought_back if redone >= place else of_layer.fetched)[0])
        before = layer if place > 1 else embedding
        return waiting._replace(activations=waiting.activations - released).plus(
            transient=float(of_layer.at_work[0]) + back + behind,
            gathered=float(moving.whole_ends[0]) + layer + before,
        )

    found = [load(count, behind=after_head)]
    if count > 1:
        found.append(load(count - 1, behind=after_layer, released=kept.last))
    if count > 2 and embedding > layer:  # noqa: PLR2004  (neither of the two above)
        found.append(load(1, behind=after_layer, released=kept.behind_first))
    return found


def _load_of_input_half(
    model: ModelSpec, layout: Layout, blocks: BlockMemory, stage: int, waiting: _Load
) -> _Load:
    """Return the moment of an I, where what it brings back for the W is among what waits."""
    moving, of_layer = blocks.transients, _layer_of_stage(model, layout, blocks, stage)
    layer = float(of_layer.whole[0])
    is_alone = layout.layers_per_stage[stage] == 1
    before = float(moving.whole_embedding[0]) * (stage == 0) if is_alone else layer
    return waiting.plus(
        transient=float((of_layer.by_input + of_layer.fetched)[0]),
        gathered=float(moving.whole_ends[0]) + layer + before,
    )


def _load_of_weight_half(
    model: ModelSpec, layout: Layout, blocks: BlockMemory, stage: int, waiting: _Load
) -> _Load:
    """Return the moment of a W: it needs no weights, and gradients behind it are reduced."""
    moving, of_layer = blocks.transients, _layer_of_stage(model, layout, blocks, stage)
    after_head = float(moving.after_head[0]) if stage == layout.num_stages - 1 else 0.0
    after_layer = float(of_layer.behind[0]) * (layout.layers_per_stage[stage] > 1)
    return waiting.plus(
        transient=float(of_layer.by_weight[0]) + max(after_head, after_layer),
        gathered=float(moving.whole_ends[0]),
    )


def _layer_of_stage(
    model: ModelSpec, layout: Layout, blocks: BlockMemory, stage: int
) -> LayerTransients:
    """Return what the layers of a stage need at most, one at a time."""
    counts = layers_by_kind(model, layout, stage)
    kinds = [place for place, kind in enumerate(blocks.kinds) if counts[kind.has_experts]]
    return blocks.transients.largest(kinds)


def _head_loads(blocks: BlockMemory, waiting: _Load, moment: Moment) -> list[_Load]:
    """Return the moments of loss and head: of a micro-batch at work, or of its put-off part."""
    moving, head, found = blocks.transients, blocks.head_bytes, []
    whole = float(moving.whole_ends[0] + moving.whole_head[0])
    if moment.until_input[-1]:
        loss, gradient = float(head.peak[0]), float(head.gradient[0])
        of_loss, of_head = float(moving.always[0]), float(moving.head[0])
        found.append(waiting.plus(transient=of_loss, logits=loss, gathered=whole))
        found.append(waiting.plus(transient=of_head, logits=gradient, gathered=whole))
        found.append(waiting.plus(transient=float(moving.head_kept[0]), gathered=whole))
    if moment.put_off[-1]:
        of_weight = float(moving.head_put_off[0])
        found.append(waiting.plus(transient=of_weight, gathered=whole))
    return found


def _embedding_load(
    blocks: BlockMemory, waiting: _Load, kept: Kept, moment: Moment, *, late: float
) -> _Load:
    """Return the moment of the embedding's gradient, which comes with the input's.

    The layers' activations are gone, but for what waits for weights' gradients.
    """
    mine = kept.until_input if moment.until_input[0] else kept.put_off
    if moment.before_i and moment.until_input[0]:
        mine -= kept.put_off
    moving = blocks.transients
    reduced = late - float(blocks.embedding.late_gradients[0])
    return waiting._replace(
        activations=waiting.activations - mine,
        transient=float(moving.embedding[0]) + reduced,
        gathered=float(moving.whole_ends[0] + moving.whole_embedding[0]),
    )


def _states_of_rank(held: list[tuple[BlockStates, int]]) -> MemoryParts:
    """Return parameters, gradients and optimizer states of a rank's blocks."""

    def total(part: str) -> float:
        return sum(count * float(getattr(block, part)[0]) for block, count in held)

    return MemoryParts(
        parameters=total("parameters"),
        gradients=total("gradients"),
        optimizer=total("optimizer"),
    )


def _step_bytes(job: TrainingJob, held: list[tuple[BlockStates, int]]) -> float:
    """Return what an optimizer step takes beside states: buckets and copies."""
    states = sum(count * float(block.optimizer[0]) for block, count in held)
    return states * copies_at_step(job) + BEHAVIOURS[job.target].bucket_bytes
