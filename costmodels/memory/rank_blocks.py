"""What a pipeline rank holds of a layout's blocks: which of them, and what a micro-batch keeps."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from costmodels.layout import Layout, Offload, Recompute
from costmodels.memory.blocks import BlockMemory
from costmodels.memory.states import BlockStates
from costmodels.model import ModelSpec

Column = NDArray[np.float64]


class Kept(NamedTuple):
    """Bytes that one micro-batch keeps in the layers of a stage.

    Attributes:
        until_input: Until its I or B.
        put_off: And then.
        last: Of `until_input`, the last layer's; 0 where they are on the host.
        behind_first: That of all but the first layer.

    """

    until_input: float
    put_off: float
    last: float
    behind_first: float


def layers_by_kind(model: ModelSpec, layout: Layout, stage: int) -> tuple[int, int]:
    """Return how many layers of a global stage have no experts, and how many have.

    Layers without experts lead the network, so they lead their stage.
    """
    first, count = sum(layout.layers_per_stage[:stage]), layout.layers_per_stage[stage]
    dense = model.num_layers if model.moe is None else model.moe.num_dense_layers
    plain = min(max(dense - first, 0), count)
    return plain, count - plain


def blocks_of_rank(
    model: ModelSpec, layout: Layout, blocks: BlockMemory, stages: Sequence[int]
) -> list[tuple[BlockStates, int]]:
    """Return the blocks of a rank's stages and how often it holds each."""
    by_stage = [layers_by_kind(model, layout, stage) for stage in stages]
    plain, experts = (sum(of_kind) for of_kind in zip(*by_stage, strict=True))
    held = [
        (states, experts if kind.has_experts else plain)
        for kind, states in zip(blocks.kinds, blocks.layer_states, strict=True)
    ]
    held.append((blocks.embedding, int(0 in stages)))
    held.append((blocks.head, int(layout.num_stages - 1 in stages)))
    return held


def kept_by_stage(model: ModelSpec, layout: Layout, blocks: BlockMemory, stage: int) -> Kept:
    """Return what one micro-batch keeps on the device in the layers of a stage."""
    counts = layers_by_kind(model, layout, stage)
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
        return Kept(until_input=output, put_off=put_off + output, last=0.0, behind_first=0.0)
    held = sum(size * count for size, count in kept)
    some = [size for size, count in kept if count] or [0.0]  # some stages have ends alone
    return Kept(
        until_input=held + output,
        put_off=put_off + output,
        last=some[-1],
        behind_first=held - some[0],
    )


def num_leading_layers(model: ModelSpec) -> int:
    """Return how many layers of another kind than the last ones lead the network."""
    kinds = [kind.has_experts for kind in model.layer_kinds]
    return len(kinds) - kinds.count(kinds[-1])


def least_by_rank(by_kind: Column, num_leading: int, num_ranks: int) -> Column:
    """Return what layers need on each pipeline rank at least, however they are split.

    As many ranks as there are leading layers may hold nothing else; all behind them hold layers of
    the last kind.

    Args:
        by_kind: What layers of each kind need by themselves: [rows, kinds].
        num_leading: Of the network, before those of the last kind.
        num_ranks: Of the pipeline.

    """
    least = np.repeat(by_kind[:, -1:], num_ranks, axis=1)
    if num_ranks == 1:
        least[:, 0] = by_kind.max(axis=1)
    elif num_leading:
        least[:, :num_leading] = by_kind.min(axis=1)[:, None]
    return least
