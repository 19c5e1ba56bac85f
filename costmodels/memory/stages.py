"""StageMemory: what the partition solver knows of a layout's memory, before layers are split.

Reserved bytes of a pipeline rank at one moment are linear in its layers. With n_k layers of kind k
in a stage that holds f micro-batches at that moment, q_k of them recomputed:

    reserved >= fixed
             + sum over the rank's stages of
                 sum over kinds   n_k * state_k + f * ((n_k - q_k) * kept_k + q_k * recomputed_k)
                 + f * boundary, but not for the last global stage
                 + embedding on global stage 0, head on the last one
             + the larger of the layers' and (on the last stage's rank) the head's transient,
               the layers' with what recomputation brings back where all of a stage are recomputed

The rank needs the largest of its moments. Without split backwards both sides are equal; with them
micro-batches whose weight gradients wait count with the least that they keep. `estimate_memory`
evaluates all and the moment of the optimizer step, so what does not fit here does not fit there.
"""

from dataclasses import dataclass, replace
from functools import partial
from math import inf

import numpy as np

from costmodels.hardware import Cluster
from costmodels.job import TrainingJob
from costmodels.layout import Layout, Offload
from costmodels.memory.blocks import BlockMemory
from costmodels.memory.framework import context_bytes, growth
from costmodels.memory.moments import Moments, rank_moments
from costmodels.memory.rank_blocks import least_by_rank, num_leading_layers
from costmodels.memory.transients import MANY_LAYERS
from costmodels.model import LayerKind, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """Reserved bytes of one layer of a kind.

    Attributes:
        states: Weights, gradients and optimizer states of the rank's share.
        kept: The least per micro-batch in flight, where the layer is not recomputed in full.
        recomputed: Per micro-batch in flight, where it is: its input.

    """

    states: float
    kept: float
    recomputed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EndMemory:
    """Reserved bytes of the embedding, or of final norm, head and loss.

    Attributes:
        states: Weights, gradients and optimizer states.
        kept: The least per micro-batch in flight.
        transient: Alive only while it runs (logits and their gradients).

    """

    states: float
    kept: float
    transient: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MovingBytes:
    """Reserved bytes beside states and activations while the layers of a stage run backward.

    Attributes:
        some_kept: The least, whatever is recomputed.
        all_recomputed: Where every layer of the stage is, each in full.

    """

    some_kept: float
    all_recomputed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Memory of one layout, by block; bytes as the card sees them (fragmentation is in).

    Attributes:
        layers: One layer of each kind.
        embedding: On the rank of global stage 0.
        head: On the rank of the last global stage.
        boundary: Per micro-batch in flight of every stage but the last: the output that it keeps.
        fixed: On every rank: context, communicators, buckets, what others took.
        moving: For each pipeline rank, gradients and gathered weights while a layer runs backward.
        moving_of_many: The same in a stage of so many layers that units of both sides are held.
        moments: For each pipeline rank, the moments that may be its fullest.
        capacity: Bytes that the driver leaves.

    """

    layers: tuple[tuple[LayerKind, LayerMemory], ...]
    embedding: EndMemory
    head: EndMemory
    boundary: float
    fixed: float
    moving: tuple[MovingBytes, ...]
    moving_of_many: tuple[MovingBytes, ...]
    moments: tuple[Moments, ...]
    capacity: float

    def layer(self, kind: LayerKind) -> LayerMemory:
        """Return the bytes of a kind of layer."""
        return dict(self.layers)[kind]


def stage_memory(
    model: ModelSpec,
    job: TrainingJob,
    cluster: Cluster,
    layout: Layout,
    blocks: BlockMemory,
    *,
    limit: float = inf,
) -> StageMemory:
    """Return the reserved bytes of a layout's blocks, for the partition solver.

    Args:
        model: The network.
        job: What is trained.
        cluster: Where.
        layout: A layout; its layers_per_stage and recompute_layers are not read.
        blocks: Its blocks.
        limit: Bytes that a rank may reserve; what the allocator keeps on top is counted where it
            decides what stays within them.

    """
    grown = growth(job, cluster, limit)
    stays = 0.0 if Offload.ACTIVATIONS in layout.offload else grown
    by_kind = {
        kind: LayerMemory(
            states=float(states.total[0]),
            kept=float(kept.waiting[0]) * stays,
            recomputed=float(kept.recomputed[0]) * stays,
        )
        for kind, states, kept in zip(
            blocks.kinds, blocks.layer_states, blocks.layer_bytes, strict=True
        )
    }
    logits, moving = blocks.head_bytes, blocks.transients
    moving_of = partial(_moving_by_rank, model, layout, blocks, grown=grown, stays=stays)
    kinds = dict.fromkeys(model.layer_kinds)
    outside = float(blocks.communication[0]) + context_bytes(cluster) + job.memory_taken
    whole_head = float(moving.whole_ends[0] + moving.whole_head[0])
    return StageMemory(
        layers=tuple((kind, by_kind[replace(kind, window=None)]) for kind in kinds),
        embedding=EndMemory(states=float(blocks.embedding.total[0]), kept=0.0, transient=0.0),
        head=EndMemory(
            states=float(blocks.head.total[0]),
            kept=float(logits.norm[0] + logits.waiting[0]) * grown,
            transient=float(blocks.head_transient[0]) * grown + whole_head,
        ),
        boundary=float(moving.boundary[0]) * grown,
        fixed=outside,
        moving=moving_of(1),
        moving_of_many=moving_of(MANY_LAYERS),
        moments=rank_moments(layout),
        capacity=cluster.usable_memory,
    )


def _moving_by_rank(
    model: ModelSpec,
    layout: Layout,
    blocks: BlockMemory,
    num_layers: int,
    *,
    grown: float,
    stays: float,
) -> tuple[MovingBytes, ...]:
    """Return what lives beside stages of at least so many layers.

    Args:
        model: The network.
        layout: How many ranks its pipeline has.
        blocks: Of the layout.
        num_layers: Of a stage, at least.
        grown: Reserved bytes per byte that comes and goes.
        stays: Reserved bytes per byte of activations that wait.

    """
    moving = blocks.transients
    kept = np.maximum.reduce([layer.kept for layer in blocks.layer_bytes]) * stays
    inputs = np.maximum.reduce([layer.recomputed for layer in blocks.layer_bytes]) * stays
    some, every = [], []
    for layer in moving.layers:
        back = grown * layer.brought_back
        least = partial(layer.least_of_stage, num_layers, grown=grown)
        some.append(moving.whole_ends + least(released=kept))
        every.append(moving.whole_ends + least(released=inputs, brought_back=back))
    leading = num_leading_layers(model)
    by_rank = (
        least_by_rank(np.stack(of_kinds, axis=1), leading, layout.pipeline_parallel)[0].tolist()
        for of_kinds in (some, every)
    )
    return tuple(
        MovingBytes(some_kept=kept, all_recomputed=redone)
        for kept, redone in zip(*by_rank, strict=True)
    )
