"""Causal attention whose values are narrower than its keys (latent attention), as one fused kernel.

Flash kernels take one width for queries, keys and values; given narrower values torch falls back
to a form that writes the scores to memory. Here values are padded with zeros for the kernel alone,
as DeepSeek's published code does for FlashAttention-2: what stays for the backward pass is q, k, v
and the output at their own widths, and one number per row.

Shapes: q, k [b, A, s, d]; v [b, A, s, e] with e < d.
"""

# ruff: noqa: ANN401  (autograd contexts take any attribute)

import math
from typing import Any

import torch
from torch import Tensor

from runtime.ops.partial_attention import part_backward, part_forward


def narrow_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Attend causally; keeps q, k, v, the output and one number per row."""
    result = _NarrowAttention.apply(q, k, v, scale or 1 / math.sqrt(q.shape[-1]))  # type: ignore[no-untyped-call]
    assert isinstance(result, Tensor)
    return result


class _NarrowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        # Values are one half of a wider product, which would stay alive with a view of it.
        v = v.contiguous()
        wide, lse = part_forward(q, k, v, is_causal=True, scale=scale)
        # Heads of a token side by side, as the output matrix reads them.
        out = wide.transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        found = part_backward(gradients[0], q, k, v, out, lse, is_causal=True, scale=ctx.scale)
        return (*found, None)
