"""Causal attention over a split sequence with keys and values gathered whole on every rank.

Ranks hold chunks r and 2 n - 1 - r of 2 n, as in `ring_attention`. Chunk c of the queries sees the
c chunks before it, a rectangle, and itself, a causal square; a rank's two chunks together see
2 n - 1 chunks and 2 halves whichever rank it is, so all do the same work. The whole keys and values
are not kept for backward: they are gathered again, then their gradients are summed and scattered.

One transfer of everything rather than n - 1 that hide behind attention: fewer, larger messages,
worth it where keys and values are few (grouped queries) or links slow to start.

Source: Llama 3, arXiv:2407.21783, section 3.3.2.

Shapes: q [b, A, s, d]; k [b, G, s, d]; v [b, G, s, e]: a rank's share of the sequence.
"""

# ruff: noqa: ANN401, PLR0917  (autograd contexts take any attribute, operands go by position)

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from runtime.communication import collectives
from runtime.communication.mesh import Group, Mesh
from runtime.ops.partial_attention import Merged, Part, attend, differentiate

_AXIS = "cp"


def gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, mesh: Mesh, scale: float | None = None
) -> Tensor:
    """Attend causally to the whole sequence; keeps q, k, v, the output and one number per row."""
    scale = scale or 1 / math.sqrt(q.shape[-1])
    result = _GatheredAttention.apply(q, k, v, mesh.group(_AXIS), scale)  # type: ignore[no-untyped-call]
    assert isinstance(result, Tensor)
    return result


def recomputed_gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, mesh: Mesh, scale: float | None = None
) -> Tensor:
    """Attend likewise and keep q, k, v only: output and statistics are made again."""
    result = checkpoint(
        gathered_attention, q, k, v, mesh, scale, use_reentrant=False, preserve_rng_state=False
    )
    assert isinstance(result, Tensor)
    return result


def gathered_parts(rank: int, num_ranks: int, length: int) -> list[Part]:
    """Return what a rank computes, with keys in the order of the sequence.

    Args:
        rank: Place of the queries' rank on the axis.
        num_ranks: Ranks of the axis.
        length: Tokens on each rank, two chunks.

    """
    half = length // 2
    parts = []
    for place, chunk in enumerate((rank, 2 * num_ranks - 1 - rank)):
        rows = slice(place * half, (place + 1) * half)
        before, own = slice(0, chunk * half), slice(chunk * half, (chunk + 1) * half)
        if chunk:
            parts.append(Part(rows=rows, columns=before, is_causal=False))
        parts.append(Part(rows=rows, columns=own, is_causal=True))
    return parts


class _GatheredAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Group, scale: float) -> Tensor:
        merged = Merged(q, v.shape[-1])
        parts = gathered_parts(group.index, group.size, q.shape[2])
        attend(merged, q, *_gather(k, v, group), parts, scale)
        out = merged.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, merged.lse)
        ctx.call = (group, scale)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        group, scale = ctx.call
        parts = gathered_parts(group.index, group.size, q.shape[2])
        whole = _gather(k, v, group)
        of_q = torch.zeros_like(q, dtype=lse.dtype)
        of_k, of_v = (torch.zeros_like(x) for x in whole)
        differentiate((of_q, of_k, of_v), gradient, (q, out, lse), whole, parts, scale)
        of_k, of_v = _scatter(of_k, of_v, group)
        return of_q.to(q.dtype), of_k, of_v, None, None


def _gather(k: Tensor, v: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Return all ranks' keys and values in the order of the sequence."""
    own = torch.cat((k.reshape(-1), v.reshape(-1)))
    every = own.new_empty((group.size, own.numel()))
    collectives.start_all_gather(every.view(-1), own, group).wait()
    keys, values = every[:, : k.numel()], every[:, k.numel() :]
    return _in_order(keys.view(-1, *k.shape)), _in_order(values.view(-1, *v.shape))


def _in_order(shares: Tensor) -> Tensor:
    """Bring [n, b, G, 2 chunks, d] into the order of the sequence: [b, G, 2 n chunks, d]."""
    early, late = shares.chunk(2, dim=3)
    return torch.cat((*early.unbind(0), *late.flip(0).unbind(0)), dim=2)


def _scatter(of_k: Tensor, of_v: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Return this rank's share of the gradients, summed over ranks."""
    keys, values = _by_rank(of_k, group.size), _by_rank(of_v, group.size)
    packed = torch.cat((keys.flatten(1), values.flatten(1)), dim=1)
    own = collectives.start_reduce_scatter(packed.view(-1), group).wait()
    size = keys[0].numel()
    return own[:size].view(keys.shape[1:]), own[size:].view(values.shape[1:])


def _by_rank(x: Tensor, num_ranks: int) -> Tensor:
    """Bring the order of the sequence into shares: the inverse of `_in_order`."""
    chunks = x.chunk(2 * num_ranks, dim=2)
    pairs = zip(chunks[:num_ranks], reversed(chunks[num_ranks:]), strict=True)
    return torch.stack([torch.cat(pair, dim=2) for pair in pairs])
