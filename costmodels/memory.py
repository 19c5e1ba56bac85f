"""Bytes of a training step: the fullest rank at its worst moment, by part.

A rank's moments, of which the largest counts:

    layers  states + activations in flight + gradients of a layer's backward pass
    head    states + activations in flight + logits and their gradients
    step    states + what the optimizer needs beside them; no activations

Model states come from `states`, activations from `activations`, micro-batches in flight from the
schedule's own table, context, communicators and fragmentation from `framework_memory`; the target
runtime's habits (`targets`) say what is kept in which format.

`estimate_memory` judges one layout, `stage_memory` hands the same numbers to the partition solver,
`memory_lower_bound` bounds many layouts over all partitions of the layers.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from costmodels.activations import HeadBytes, LayerBytes, head_bytes, layer_bytes
from costmodels.framework_memory import (
    cached_bytes,
    communicator_bytes,
    context_bytes,
    fragmentation_fraction,
)
from costmodels.hardware import Cluster
from costmodels.job import TrainingJob
from costmodels.layout import Layout, Offload, Recompute
from costmodels.layout_table import LayoutTable, table_of
from costmodels.model import LayerKind, ModelSpec
from costmodels.schedule import held_moments
from costmodels.stage_memory import EndMemory, LayerMemory, StageMemory
from costmodels.states import (
    BlockStates,
    bytes_per_weight,
    embedding_states,
    head_states,
    layer_states,
)
from costmodels.targets import BEHAVIOURS
from costmodels.terms import MemoryEstimate, MemoryParts
from costmodels.transients import Transients, transients

Column = NDArray[np.float64]
Moments = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMemory:
    """Allocated bytes of every block of some layouts: one value per layout in each array."""

    kinds: tuple[LayerKind, ...]
    layer_states: tuple[BlockStates, ...]
    layer_bytes: tuple[LayerBytes, ...]
    embedding: BlockStates
    head: BlockStates
    head_bytes: HeadBytes
    transients: Transients
    communication: Column


def block_memory(
    model: ModelSpec,
    job: TrainingJob,
    cluster: Cluster,
    table: LayoutTable,
    modules: tuple[str, ...] = (),
) -> BlockMemory:
    """Return the bytes of every block; layers that differ in their window only are one kind."""
    kinds = tuple(dict.fromkeys(replace(kind, window=None) for kind in model.layer_kinds))
    states = tuple(layer_states(model, job, kind, table) for kind in kinds)
    activations = tuple(layer_bytes(model, job, kind, table, modules) for kind in kinds)
    embedding, head = embedding_states(model, job, table), head_states(model, job, table)
    return BlockMemory(
        kinds=kinds,
        layer_states=states,
        layer_bytes=activations,
        embedding=embedding,
        head=head,
        head_bytes=head_bytes(model, job, table),
        transients=transients(model, job, table, states, activations, embedding, head),
        communication=communicator_bytes(model, job, cluster, table),
    )


def estimate_memory(
    model: ModelSpec, job: TrainingJob, cluster: Cluster, layout: Layout
) -> MemoryEstimate:
    """Return the memory of one layout: every pipeline rank by part, host memory, load-time peak.

    Args:
        model: The network.
        job: What is trained.
        cluster: Where.
        layout: A legal layout; its layers_per_stage names each stage's layers.

    Raises:
        ValueError: A recompute module is unknown.

    """
    blocks = block_memory(model, job, cluster, table_of([layout]), layout.recompute_modules)
    moments = rank_moments(layout)
    ranks = tuple(
        _reserved(
            job,
            cluster,
            _fullest(model, job, layout, blocks, rank, moments[rank]),
            float(blocks.communication[0]),
        )
        for rank in range(layout.pipeline_parallel)
    )
    worst = max(range(len(ranks)), key=lambda rank: (ranks[rank].reserved, -rank))
    return MemoryEstimate(
        capacity=cluster.usable_memory,
        worst_rank=worst,
        per_rank=ranks,
        reserved_interval=reserved_interval(ranks[worst]),
        host_per_node=_host_per_node(model, cluster, layout, blocks),
        load_peak=_load_peak(cluster, ranks[worst], blocks),
    )


def rank_moments(layout: Layout) -> tuple[Moments, ...]:
    """Return, per pipeline rank, the moments that may be its fullest.

    A moment tells how many micro-batches each of the rank's stages holds, in model order; moments
    that hold no more than another in any stage are left out.
    """
    held = held_moments(
        layout.schedule,
        layout.pipeline_parallel,
        layout.stages_per_rank,
        layout.num_micro_batches,
    )
    return tuple(_maximal(moments.until_weight) for moments in held)


def _maximal(rows: NDArray[np.int64]) -> Moments:
    """Return the rows that no other row exceeds everywhere."""
    kept: list[NDArray[np.int64]] = []
    for row in rows[np.argsort(-rows.sum(axis=1), kind="stable")]:
        if not any(bool((row <= other).all()) for other in kept):
            kept.append(row)
    return tuple(tuple(int(count) for count in row) for row in kept)


def _fullest(
    model: ModelSpec,
    job: TrainingJob,
    layout: Layout,
    blocks: BlockMemory,
    rank: int,
    moments: Moments,
) -> MemoryParts:
    """Return the allocator's parts of one pipeline rank at the largest of its moments."""
    stages = layout.stages_of_rank(rank)
    states = _states_of_rank(model, layout, blocks, stages)
    per_micro_batch = [_kept_by_stage(model, layout, blocks, stage) for stage in stages]
    moving, logits = blocks.transients, blocks.head_bytes
    saved, norm = float(logits.saved[0]), float(logits.norm[0])
    backward = moving.recompute if _recomputes_whole_stage(layout, stages) else moving.layers
    has_head = layout.num_stages - 1 in stages
    found = [replace(states, transient=_step_bytes(model, job, layout, blocks, stages))]
    for moment in moments:
        kept = sum(count * size for count, size in zip(moment, per_micro_batch, strict=True))
        waiting = moment[-1] if has_head else 0
        layers = replace(
            states,
            activations=kept + waiting * norm,
            logits=max(waiting - 1, 0) * saved,
            transient=float(backward[0]),
        )
        found.append(layers)
        if waiting:
            loss = layers.logits + float(logits.peak[0])
            found.append(replace(layers, logits=loss, transient=float(moving.always[0])))
            output = layers.logits + float(logits.gradient[0])
            found.append(replace(layers, logits=output, transient=float(moving.head[0])))
    return max(found, key=lambda parts: parts.reserved)


def _reserved(
    job: TrainingJob, cluster: Cluster, parts: MemoryParts, communication: float
) -> MemoryParts:
    """Add to an allocator's parts what the card holds beside them."""
    coming_and_going = parts.activations + parts.logits + parts.transient
    outside = context_bytes(cluster) + job.memory_taken
    outside += fragmentation_fraction(job, cluster) * coming_and_going
    demand = replace(parts, communication=communication, framework=outside)
    room = cluster.usable_memory - demand.reserved
    cached = cached_bytes(job, cluster, coming_and_going, room)
    return replace(demand, framework=outside + cached)


def layers_of_stage(model: ModelSpec, layout: Layout, stage: int) -> tuple[LayerKind, ...]:
    """Return the kinds of the layers that a global stage holds, in order, windows left out."""
    first = sum(layout.layers_per_stage[:stage])
    layers = range(first, first + layout.layers_per_stage[stage])
    return tuple(replace(model.layer_kind(layer), window=None) for layer in layers)


def _states_of_rank(
    model: ModelSpec, layout: Layout, blocks: BlockMemory, stages: Sequence[int]
) -> MemoryParts:
    """Return parameters, gradients and optimizer states of a rank's stages."""
    held = _blocks_of_rank(model, layout, blocks, stages)

    def total(part: str) -> float:
        return sum(count * float(getattr(block, part)[0]) for block, count in held)

    return MemoryParts(
        parameters=total("parameters") + float(blocks.transients.gathered[0]),
        gradients=total("gradients"),
        optimizer=total("optimizer"),
    )


def _blocks_of_rank(
    model: ModelSpec, layout: Layout, blocks: BlockMemory, stages: Sequence[int]
) -> list[tuple[BlockStates, int]]:
    """Return the blocks of a rank's stages and how often it holds each."""
    counts = Counter(kind for stage in stages for kind in layers_of_stage(model, layout, stage))
    held = [
        (states, counts[kind])
        for kind, states in zip(blocks.kinds, blocks.layer_states, strict=True)
    ]
    held.append((blocks.embedding, int(0 in stages)))
    held.append((blocks.head, int(layout.num_stages - 1 in stages)))
    return held


def _kept_by_stage(model: ModelSpec, layout: Layout, blocks: BlockMemory, stage: int) -> float:
    """Return what one micro-batch keeps in the layers of a stage; offloading leaves two layers."""
    kinds = layers_of_stage(model, layout, stage)
    by_kind = dict(zip(blocks.kinds, blocks.layer_bytes, strict=True))
    num_recomputed = 0
    if layout.recompute is Recompute.FULL:
        num_recomputed = layout.recompute_layers or len(kinds)
    kept = [
        float((by_kind[kind].recomputed if place < num_recomputed else by_kind[kind].kept)[0])
        for place, kind in enumerate(kinds)
    ]
    if Offload.ACTIVATIONS in layout.offload:
        return sum(sorted(kept)[-LAYERS_BEING_MOVED:])
    return sum(kept)


LAYERS_BEING_MOVED = 2  # one on its way to the host, one at work


def _recomputes_whole_stage(layout: Layout, stages: Sequence[int]) -> bool:
    """Whether a stage keeps inputs only, so that a layer's activations come back on top."""
    if layout.recompute is not Recompute.FULL:
        return False
    counts = [layout.layers_per_stage[stage] for stage in stages]
    return any(0 < count <= (layout.recompute_layers or count) for count in counts)


def _step_bytes(
    model: ModelSpec,
    job: TrainingJob,
    layout: Layout,
    blocks: BlockMemory,
    stages: Sequence[int],
) -> float:
    """Return the copies of 16-bit gradients that some optimizers make of their shard."""
    per_weight = bytes_per_weight(job)
    copies = BEHAVIOURS[job.target].step_bytes if per_weight.gradient < FP32_BYTES else 0
    if not copies or not per_weight.optimizer:
        return 0.0
    held = _blocks_of_rank(model, layout, blocks, stages)
    states = sum(count * float(block.optimizer[0]) for block, count in held)
    return states / per_weight.optimizer * copies


FP32_BYTES = 4


def _host_per_node(
    model: ModelSpec, cluster: Cluster, layout: Layout, blocks: BlockMemory
) -> float:
    """Return what offloading takes on the fullest node: its ranks times the fullest rank's share."""
    shares = []
    for rank in range(layout.pipeline_parallel):
        stages = layout.stages_of_rank(rank)
        held = _blocks_of_rank(model, layout, blocks, stages)
        share = sum(count * float(block.host[0]) for block, count in held)
        if Offload.ACTIVATIONS in layout.offload:
            moment = rank_moments(layout)[rank][0]
            on_gpu = replace(layout, offload=())
            sizes = [_kept_by_stage(model, on_gpu, blocks, stage) for stage in stages]
            share += sum(count * size for count, size in zip(moment, sizes, strict=True))
        shares.append(share)
    return max(shares) * min(cluster.gpus_per_node, cluster.num_gpus)


def _load_peak(cluster: Cluster, fullest: MemoryParts, blocks: BlockMemory) -> float:
    """Return a GPU's bytes while weights are read: its weights, masters and one whole matrix."""
    end = max(float(blocks.embedding.local_weights[0]), float(blocks.head.local_weights[0]))
    return fullest.parameters + fullest.optimizer / 3 + end * 4 + context_bytes(cluster)


def reserved_interval(parts: MemoryParts) -> tuple[float, float]:
    """Return the 80 % interval of reserved bytes.

    States are exact; what comes and goes, and what lies outside the allocator, is known to a
    share. The shares are chosen so that about 80 % of measured runs lie inside (tests/costmodels).
    """
    sure = parts.parameters + parts.gradients + parts.optimizer
    unsure = parts.reserved - sure
    width = STATES_SPREAD * sure + MOVING_SPREAD * unsure
    return parts.reserved - width, parts.reserved + width


STATES_SPREAD = 0.02  # chosen: padding, unlisted buffers
MOVING_SPREAD = 0.2  # chosen: see reserved_interval


def stage_memory(
    model: ModelSpec, job: TrainingJob, cluster: Cluster, layout: Layout
) -> StageMemory:
    """Return the reserved bytes of a layout's blocks, for the partition solver.

    Args:
        model: The network.
        job: What is trained.
        cluster: Where.
        layout: A layout; its layers_per_stage and recompute_layers are not read.

    """
    blocks = block_memory(model, job, cluster, table_of([layout]), layout.recompute_modules)
    grown = 1 + fragmentation_fraction(job, cluster)
    stays = 0.0 if Offload.ACTIVATIONS in layout.offload else grown
    by_kind = {
        kind: LayerMemory(
            states=float(states.total[0]),
            kept=float(kept.kept[0]) * stays,
            recomputed=float(kept.recomputed[0]) * stays,
        )
        for kind, states, kept in zip(
            blocks.kinds, blocks.layer_states, blocks.layer_bytes, strict=True
        )
    }
    logits, moving = blocks.head_bytes, blocks.transients
    kinds = dict.fromkeys(model.layer_kinds)
    outside = float(blocks.communication[0]) + context_bytes(cluster) + job.memory_taken
    return StageMemory(
        layers=tuple((kind, by_kind[replace(kind, window=None)]) for kind in kinds),
        embedding=EndMemory(states=float(blocks.embedding.total[0]), kept=0.0, transient=0.0),
        head=EndMemory(
            states=float(blocks.head.total[0]),
            kept=float(logits.norm[0] + logits.saved[0]) * grown,
            transient=float(_head_transient(blocks)[0]) * grown,
        ),
        fixed=outside + float(moving.gathered[0]),
        transient=float(moving.layers[0]) * grown,
        recompute_transient=float(moving.recompute[0]) * grown,
        moments=rank_moments(layout),
        capacity=cluster.usable_memory,
    )


def _head_transient(blocks: BlockMemory) -> Column:
    """Return what head and loss add beside saved logits: at the loss, or at the head's backward."""
    logits, moving = blocks.head_bytes, blocks.transients
    worst = np.maximum(logits.peak + moving.always, logits.gradient + moving.head)
    return worst - logits.saved
