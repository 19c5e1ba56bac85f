"""Bytes of a training step: the fullest rank at its worst moment, by part.

Model states come from `states`, activations from `activations`, what lives for a moment from
`transients`; `ranks` finds each rank's fullest moment; context, communicators and fragmentation
come from `framework`; the target runtime's habits (`costmodels.targets`) say what is kept in which
format.

`estimate_memory` judges one layout, `memory_demand` as far as a search asks, `stages.stage_memory`
hands the same numbers to the partition solver, `memory_lower_bound` bounds many layouts over all
partitions of the layers.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from costmodels.bounds.memory import memory_lower_bound
from costmodels.hardware import Cluster
from costmodels.job import TrainingJob
from costmodels.layout import Layout, Offload
from costmodels.layout_table import table_of
from costmodels.memory.blocks import BlockMemory, block_memory
from costmodels.memory.framework import (
    cached_bytes,
    context_bytes,
    fragmentation_fraction,
    growth_with_room,
)
from costmodels.memory.moments import rank_moments
from costmodels.memory.rank_blocks import blocks_of_rank, kept_by_stage
from costmodels.memory.ranks import fullest_moment, telling_ranks
from costmodels.model import ModelSpec
from costmodels.targets import BEHAVIOURS
from costmodels.terms import MemoryEstimate, MemoryParts

__all__ = [
    "MemoryDemand",
    "blocks_of_layout",
    "estimate_memory",
    "memory_demand",
    "memory_lower_bound",
    "reserved_interval",
]

STATES_SPREAD = 0.02  # chosen: padding, unlisted buffers
MOVING_SPREAD = 0.3  # fitted: 80 % of 169 measured peaks lie inside (see reserved_interval)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryDemand:
    """What a search asks of a layout's memory.

    Attributes:
        reserved: Bytes of the fullest rank.
        host_per_node: Host bytes that offload takes on each node.

    """

    reserved: float
    host_per_node: float


def estimate_memory(
    model: ModelSpec,
    job: TrainingJob,
    cluster: Cluster,
    layout: Layout,
    blocks: BlockMemory | None = None,
) -> MemoryEstimate:
    """Return the memory of one layout: every pipeline rank by part, host memory, load-time peak.

    Args:
        model: The network.
        job: What is trained.
        cluster: Where.
        layout: A legal layout; its layers_per_stage names each stage's layers.
        blocks: Of the layout alone, whatever its split, where they are known.

    Raises:
        ValueError: A recompute module is unknown.

    """
    if blocks is None:
        blocks = blocks_of_layout(model, job, cluster, layout)
    every = range(layout.pipeline_parallel)
    ranks = _parts_of_ranks(model, job, cluster, layout, blocks, ranks=every)
    worst = max(range(len(ranks)), key=lambda rank: (ranks[rank].reserved, -rank))
    return MemoryEstimate(
        capacity=cluster.usable_memory,
        worst_rank=worst,
        per_rank=ranks,
        reserved_interval=reserved_interval(ranks[worst]),
        host_per_node=_host_per_node(model, cluster, layout, blocks),
        load_peak=_load_peak(cluster, ranks[worst], blocks),
    )


def memory_demand(
    model: ModelSpec, job: TrainingJob, cluster: Cluster, layout: Layout, blocks: BlockMemory
) -> MemoryDemand:
    """Return what `estimate_memory` says of the fullest rank and the host, and no more.

    Args:
        model: The network.
        job: What is trained.
        cluster: Where.
        layout: A legal layout.
        blocks: Of the layout alone, whatever its split.

    """
    ranks = telling_ranks(model, layout)
    parts = _parts_of_ranks(model, job, cluster, layout, blocks, ranks=ranks)
    return MemoryDemand(
        reserved=max(of_rank.reserved for of_rank in parts),
        host_per_node=_host_per_node(model, cluster, layout, blocks),
    )


def _parts_of_ranks(
    model: ModelSpec,
    job: TrainingJob,
    cluster: Cluster,
    layout: Layout,
    blocks: BlockMemory,
    *,
    ranks: Iterable[int],
) -> tuple[MemoryParts, ...]:
    """Return the parts of some pipeline ranks, each at its fullest moment."""
    moments = rank_moments(layout)
    communication = float(blocks.communication[0])
    grown = growth_with_room(job, cluster)
    fullest = (
        fullest_moment(model, job, layout, blocks, rank=rank, moments=moments[rank], grown=grown)
        for rank in ranks
    )
    return tuple(
        _reserved(job, cluster, parts, communication=communication, step=step)
        for parts, step in fullest
    )


def _reserved(
    job: TrainingJob,
    cluster: Cluster,
    parts: MemoryParts,
    *,
    communication: float,
    step: float,
) -> MemoryParts:
    """Add to an allocator's parts what the card holds beside them.

    Args:
        job: Switches and target.
        cluster: Constants and capacity.
        parts: The allocator's bytes at the rank's fullest moment.
        communication: Bytes of communicators.
        step: Bytes of the optimizer step's own buffers. Blocks cut for activations are too small
            for them, so that the cache holds both while there is room.

    """
    coming_and_going = parts.activations + parts.logits + parts.transient
    outside = context_bytes(cluster) + job.memory_taken
    outside += fragmentation_fraction(job, cluster) * coming_and_going
    demand = replace(parts, communication=communication, framework=outside)
    room = cluster.usable_memory - demand.reserved
    beside = step if parts.activations > 0 and BEHAVIOURS[job.target].flat_step_buffers else 0.0
    cached = cached_bytes(job, cluster, coming_and_going, beside, room)
    return replace(demand, framework=outside + cached)


def _host_per_node(
    model: ModelSpec, cluster: Cluster, layout: Layout, blocks: BlockMemory
) -> float:
    """Return what offloading takes on a node, as if all its ranks were the fullest."""
    if not layout.offload:
        return 0.0
    shares = []
    for rank in range(layout.pipeline_parallel):
        stages = layout.stages_of_rank(rank)
        held = blocks_of_rank(model, layout, blocks, stages)
        share = sum(count * float(block.host[0]) for block, count in held)
        if Offload.ACTIVATIONS in layout.offload:
            fullest = max(rank_moments(layout)[rank], key=lambda moment: moment.in_flight)
            on_gpu = replace(layout, offload=())
            sizes = [kept_by_stage(model, on_gpu, blocks, stage) for stage in stages]
            share += sum(
                (waiting + later) * size.until_input
                for size, waiting, later in zip(sizes, *fullest[:2], strict=True)
            )
        shares.append(share)
    return max(shares) * min(cluster.gpus_per_node, cluster.num_gpus)


def _load_peak(cluster: Cluster, fullest: MemoryParts, blocks: BlockMemory) -> float:
    """Return a GPU's bytes while weights are read: its weights, masters and one whole matrix."""
    end = max(float(blocks.embedding.local_weights[0]), float(blocks.head.local_weights[0]))
    return fullest.parameters + fullest.optimizer / 3 + end * 4 + context_bytes(cluster)


def reserved_interval(parts: MemoryParts) -> tuple[float, float]:
    """Return the 80 % interval of reserved bytes.

    States are exact; what comes and goes, and what lies outside the allocator, is known to a
    share. The shares are chosen so that about 80 % of measured runs lie inside.
    """
    sure = parts.parameters + parts.gradients + parts.optimizer
    unsure = parts.reserved - sure
    width = STATES_SPREAD * sure + MOVING_SPREAD * unsure
    return parts.reserved - width, parts.reserved + width


def blocks_of_layout(
    model: ModelSpec, job: TrainingJob, cluster: Cluster, layout: Layout
) -> BlockMemory:
    """Return the bytes of a layout's blocks, the same for every split of its layers."""
    return block_memory(model, job, cluster, table_of([layout]), layout.recompute_modules)
