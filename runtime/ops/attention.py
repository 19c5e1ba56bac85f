"""Causal attention in the forms that a plan may ask for; plain functions that graphs call.

    form                           keeps for backward
    torch's fused kernel           q, k, v, output, one statistic per row
    fused_attention                the same, also where values are narrower than keys
    recomputed_attention           q, k, v
    unfused_attention              q, k, v and the probabilities [b, heads, s, s]
    recomputed_unfused_attention   q, k, v

Shapes: q [b, A, s, d]; k [b, G, s, d]; v [b, G, s, e] with G dividing A and e <= d.
"""

import math

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own idiom)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from runtime.ops.narrow_attention import narrow_attention


def fused_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Attend causally by torch's fused kernel, which takes values as wide as keys."""
    if v.shape[-1] < q.shape[-1]:
        return narrow_attention(q, k, v, scale)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)


def unfused_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Attend causally with the scores written to memory, softmax in fp32 or wider."""
    batch, heads, length, width = q.shape
    groups = k.shape[1]
    # Heads that share keys stand next to each other: [b, G, A/G, s, d] against [b, G, 1, s, d].
    grouped = q.reshape(batch, groups, heads // groups, length, width)
    scores = grouped @ k.unsqueeze(2).transpose(-1, -2) * (scale or 1 / math.sqrt(width))
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(hidden, float("-inf"))
    wide = torch.promote_types(q.dtype, torch.float32)
    weights = scores.softmax(-1, dtype=wide).to(q.dtype)
    return (weights @ v.unsqueeze(2)).reshape(batch, heads, length, v.shape[-1])


def recomputed_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Attend by the fused kernel, once forward and once more for the backward pass."""
    return _recomputed(fused_attention, q, k, v, scale)


def recomputed_unfused_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None
) -> Tensor:
    """Attend with scores in memory, but not kept for the backward pass."""
    return _recomputed(unfused_attention, q, k, v, scale)


def _recomputed(function: object, *arguments: object) -> Tensor:
    if not torch.is_grad_enabled():
        return function(*arguments)  # type: ignore[operator, no-any-return]
    # Attention draws no random numbers, so no generator state is kept.
    result = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(result, Tensor)
    return result


FORMS = (fused_attention, unfused_attention, recomputed_attention, recomputed_unfused_attention)
