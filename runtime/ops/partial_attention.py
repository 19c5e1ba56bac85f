"""Attention of some queries to some keys, and what it takes to make the whole from such parts.

    s = scale q k^T,  lse = log sum exp s,  out = exp(s - lse) v         per part, in one kernel
    lse = log sum_i exp(lse_i),  out = sum_i exp(lse_i - lse) out_i      all parts together
    dq, dk, dv of a part: its probabilities are exp(s - lse) with the lse of the whole

so the backward kernel of a part takes the whole's output and statistic (softmax in pieces:
FlashAttention, arXiv:2205.14135, section 3.1). A part is a rectangle of the square of queries and
keys, or a square on its diagonal.

Kernels: torch's flash attention on the CPU (every dtype) and on CUDA (16 bits); elsewhere a plain
form, which writes the part's scores to memory.

Shapes: q [b, A, s, d]; k [b, G, t, d]; v [b, G, t, e]; lse [b, A, s]; G divides A, and e <= d.
"""

# ruff: noqa: PLR0917  (kernels take their operands by position)

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own idiom)
from torch import Tensor

_aten = torch.ops.aten
_CPU_FLASH = _aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001
_CPU_FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default  # noqa: SLF001
_CUDA_FLASH = _aten._scaled_dot_product_flash_attention.default  # noqa: SLF001
_CUDA_FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention_backward.default  # noqa: SLF001
# FlashAttention-2's kernels as torch builds them: heads of 8, 16 ... 256 in 16 bits.
_CUDA_FLASH_DTYPES = (torch.float16, torch.bfloat16)
_CUDA_FLASH_ALIGNMENT, _CUDA_FLASH_LARGEST = 8, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Which queries meet which keys, by their places in the tensors at hand.

    Attributes:
        is_causal: A query sees the keys up to its own place in the part, which is square.

    """

    rows: slice
    columns: slice
    is_causal: bool

    @property
    def num_pairs(self) -> float:
        """Pairs of a query and a key that count; half of a causal square, as kernels count."""
        num_rows: int = self.rows.stop - self.rows.start
        num_columns: int = self.columns.stop - self.columns.start
        pairs = num_rows * num_columns
        return pairs / 2 if self.is_causal else pairs


class Merged:
    """Attention to all keys so far, part by part, in fp32 or wider."""

    def __init__(self, q: Tensor, value_width: int) -> None:
        """Begin with queries that have seen nothing."""
        wide = torch.promote_types(q.dtype, torch.float32)
        self.out = q.new_zeros((*q.shape[:-1], value_width), dtype=wide)
        self.lse = q.new_full(q.shape[:-1], -math.inf, dtype=wide)

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Take in what some queries found among further keys."""
        kept, seen = self.out[:, :, rows], self.lse[:, :, rows]
        total = torch.logaddexp(seen, lse)
        kept.mul_((seen - total).exp_().unsqueeze(-1))
        kept.add_(out * (lse - total).exp_().unsqueeze(-1))
        seen.copy_(total)


def attend(
    merged: Merged, q: Tensor, k: Tensor, v: Tensor, parts: Iterable[Part], scale: float
) -> None:
    """Add what the queries of each part find among its keys."""
    for part in parts:
        keys, values = k[:, :, part.columns], v[:, :, part.columns]
        found = part_forward(q[:, :, part.rows], keys, values, part.is_causal, scale)
        merged.add(part.rows, *found)


def differentiate(
    gradients: tuple[Tensor, Tensor, Tensor],
    gradient: Tensor,
    whole: tuple[Tensor, Tensor, Tensor],
    keys_values: tuple[Tensor, Tensor],
    parts: Iterable[Part],
    scale: float,
) -> None:
    """Add each part's share to the gradients of queries, keys and values.

    Args:
        gradients: Of q, k, v; added to in place.
        gradient: Of the output.
        whole: q, output and lse over all keys.
        keys_values: k and v.
        parts: As in forward.
        scale: As in forward.

    """
    k, v = keys_values
    of_q, of_k, of_v = gradients
    for part in parts:
        rows, columns = part.rows, part.columns
        q, out, lse = (x[:, :, rows] for x in whole)
        inputs = (gradient[:, :, rows], q, k[:, :, columns], v[:, :, columns], out, lse)
        found = part_backward(*inputs, part.is_causal, scale)
        of_q[:, :, rows] += found[0]
        of_k[:, :, columns] += found[1]
        of_v[:, :, columns] += found[2]


# Kernels.


def part_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the output of each query, as wide as the values, and its log-sum-exp."""
    width = v.shape[-1]
    wide = _as_wide_as(v, q)
    if not q.is_cuda:
        out, lse = _CPU_FLASH(q, k, wide, 0.0, is_causal, scale=scale)
    elif _takes_flash(q):
        out, lse = _CUDA_FLASH(q, k, wide, 0.0, is_causal, scale=scale)[:2]
    else:
        return _plain_forward(q, k, v, is_causal, scale)
    return out[..., :width], lse


def part_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a part's gradients of queries, keys and values."""
    width = v.shape[-1]
    if q.is_cuda and not _takes_flash(q):
        return _plain_backward(gradient, q, k, v, out, lse, is_causal, scale)
    wide = (_as_wide_as(gradient, q), q, k, _as_wide_as(v, q), _as_wide_as(out, q))
    lse = lse.contiguous()  # kernels step through it without strides
    if q.is_cuda:
        lengths = (None, None, q.shape[2], k.shape[2])
        unused = torch.zeros(2, dtype=torch.int64, device=q.device)  # seeds of a dropout of 0
        of_q, of_k, of_v = _CUDA_FLASH_BACKWARD(
            *wide, lse, *lengths, 0.0, is_causal, unused, unused, scale=scale
        )
    else:
        of_q, of_k, of_v = _CPU_FLASH_BACKWARD(*wide, lse, 0.0, is_causal, scale=scale)
    return of_q, of_k, of_v[..., :width]


def _takes_flash(q: Tensor) -> bool:
    width = q.shape[-1]
    fits = width % _CUDA_FLASH_ALIGNMENT == 0 and width <= _CUDA_FLASH_LARGEST
    return fits and q.dtype in _CUDA_FLASH_DTYPES


def _as_wide_as(x: Tensor, q: Tensor) -> Tensor:
    """Return heads padded with zeros to the width of queries: kernels take one width."""
    missing = q.shape[-1] - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """Put heads that share keys side by side: [b, A, ...] to [b, G, A/G, ...]."""
    return x.reshape(x.shape[0], k.shape[1], -1, *x.shape[2:])


def _scores(q: Tensor, k: Tensor, is_causal: bool, scale: float) -> Tensor:
    """Return [b, G, A/G, s, t] in fp32 or wider; hidden keys score minus infinity."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores: Tensor = _grouped(q, k).to(wide) @ k.unsqueeze(2).transpose(-1, -2).to(wide) * scale
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


def _plain_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, is_causal, scale)
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1)).exp_() @ v.unsqueeze(2).to(scores.dtype)
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def _plain_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    scores = _scores(q, k, is_causal, scale)
    wide = scores.dtype
    weights = (scores - _grouped(lse, k).unsqueeze(-1)).exp_()
    grouped = _grouped(gradient, k).to(wide)
    of_v = (weights.transpose(-1, -2) @ grouped).sum(2)
    own = (grouped * _grouped(out, k).to(wide)).sum(-1, keepdim=True)
    of_scores = weights * (grouped @ v.unsqueeze(2).transpose(-1, -2).to(wide) - own) * scale
    of_q = (of_scores @ k.unsqueeze(2).to(wide)).flatten(1, 2)
    of_k = (of_scores.transpose(-1, -2) @ _grouped(q, k).to(wide)).sum(2)
    return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype)
