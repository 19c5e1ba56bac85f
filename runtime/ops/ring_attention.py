"""Causal attention over a sequence that is split over the context axis, keys and values passed on.

With n ranks the sequence is cut into 2 n chunks, and rank r holds chunks r and 2 n - 1 - r (see
`runtime/context.py`). Keys and values go around the ring while attention computes; in step i a rank
meets those of rank j = r - i:

    j = r    its own: a causal square
    j < r    both of its chunks come after chunk j and before chunk 2 n - 1 - j:    all x first half
    j > r    only its second chunk comes after those of j, after both of them:     second half x all

Every step is half of the square of 2 chunks x 2 chunks, so all ranks do the same work. Backward
goes around again, and the gradients of keys and values travel one step behind them, collecting each
rank's share until they reach their owner: n - 1 steps each, in the dtype of the values (what rank
r adds to its own stays there until then).

Source: Liu, Zaharia and Abbeel, "Ring Attention", arXiv:2310.01889; the pairs of chunks are those
of Llama 3, arXiv:2407.21783, section 3.3.2.

Shapes: q [b, A, s, d]; k [b, G, s, d]; v [b, G, s, e]: a rank's share of the sequence.
"""

# ruff: noqa: ANN401, PLR0917  (autograd contexts take any attribute, operands go by position)

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from runtime.communication.mesh import Group, Mesh
from runtime.communication.ring import start_shift
from runtime.ops.partial_attention import Merged, Part, attend, differentiate

_AXIS = "cp"
_KEYS_VALUES, _GRADIENTS = 0, 1  # tags of what is under way at once


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, mesh: Mesh, scale: float | None = None
) -> Tensor:
    """Attend causally to the whole sequence; keeps q, k, v, the output and one number per row."""
    scale = scale or 1 / math.sqrt(q.shape[-1])
    result = _RingAttention.apply(q, k, v, mesh.group(_AXIS), scale)  # type: ignore[no-untyped-call]
    assert isinstance(result, Tensor)
    return result


def recomputed_ring_attention(
    q: Tensor, k: Tensor, v: Tensor, mesh: Mesh, scale: float | None = None
) -> Tensor:
    """Attend likewise and keep q, k, v only: backward goes around the ring once more."""
    result = checkpoint(
        ring_attention, q, k, v, mesh, scale, use_reentrant=False, preserve_rng_state=False
    )
    assert isinstance(result, Tensor)
    return result


def ring_part(rank: int, owner: int, length: int) -> Part:
    """Return what a rank computes with the keys and values of another.

    Args:
        rank: Place of the queries' rank on the ring.
        owner: Place of the rank whose keys and values these are.
        length: Tokens on each rank, two chunks.

    """
    everything, half = slice(0, length), length // 2
    if owner == rank:
        return Part(rows=everything, columns=everything, is_causal=True)
    if owner < rank:
        return Part(rows=everything, columns=slice(0, half), is_causal=False)
    return Part(rows=slice(half, length), columns=everything, is_causal=False)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Group, scale: float) -> Tensor:
        merged = Merged(q, v.shape[-1])
        passing = _pack(k, v)
        for step in range(group.size):
            more = step + 1 < group.size
            arriving = start_shift(passing, group, _KEYS_VALUES) if more else None
            part = ring_part(group.index, (group.index - step) % group.size, q.shape[2])
            attend(merged, q, *_unpack(passing, k, v), [part], scale)
            if arriving is not None:
                passing = arriving.wait()
        out = merged.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, merged.lse)
        ctx.call = (group, scale)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        group, scale = ctx.call
        of_q = torch.zeros_like(q, dtype=lse.dtype)
        passing, travelling = _pack(k, v), None
        own = torch.zeros_like(passing)
        for step in range(group.size):
            more = step + 1 < group.size
            arriving = start_shift(passing, group, _KEYS_VALUES) if more else None
            part = ring_part(group.index, (group.index - step) % group.size, q.shape[2])
            found = own if step == 0 else torch.zeros_like(passing)
            whole = (q, out, lse)
            gradients = (of_q, *_unpack(found, k, v))
            differentiate(gradients, gradient, whole, _unpack(passing, k, v), [part], scale)
            if travelling is not None:
                found += travelling.wait()
            if step > 0:
                travelling = start_shift(found, group, _GRADIENTS)
            if arriving is not None:
                passing = arriving.wait()
        if travelling is not None:
            own += travelling.wait()
        return of_q.to(q.dtype), *_unpack(own, k, v), None, None


def _pack(k: Tensor, v: Tensor) -> Tensor:
    """Lay keys and values into one message."""
    return torch.cat((k.reshape(-1), v.reshape(-1)))


def _unpack(packed: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of a message with the shapes of keys and values."""
    return packed[: k.numel()].view(k.shape), packed[k.numel() :].view(v.shape)
