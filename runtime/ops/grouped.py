"""Products of runs of rows, each with a matrix of its own: the experts of one rank.

    out[rows of e] = x[rows of e] @ weights[e]^T          dx likewise, dw[e] = dy[rows]^T @ x[rows]

One node of autograd whatever the runs' lengths, so that ranks whose experts get no rows save and
recompute the same tensors as the others. On CUDA in bf16 torch's grouped kernel does it in one
launch; elsewhere it is one product per expert, written in place, within one operator: hundreds of
experts are hundreds of products, but one line of a dry run.

Shapes: N rows, K features in, M out, E experts.
"""

# ruff: noqa: ANN401  (autograd contexts take any attribute)

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own idiom)
from torch import Tensor, library

_ALIGNED = 8  # bf16 elements of 16 bytes: torch's grouped kernel asks it of every row


def grouped_linear(x: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
    """Return [N, M]: each run of rows times its expert's matrix.

    Args:
        x: [N, K], rows sorted by expert.
        weights: [E, M, K].
        counts: Rows of each expert; they sum to N.

    """
    fits = not any(size % _ALIGNED for size in weights.shape[1:])
    if x.is_cuda and x.dtype == torch.bfloat16 and fits:
        return fused(x, weights, counts)
    apply = cast("Callable[..., Tensor]", _GroupedLinear.apply)
    return apply(x, weights, tuple(counts))


def fused(x: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the same by torch's grouped kernel."""
    ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=x.device)
    return F.grouped_mm(x, weights.transpose(-2, -1), offs=ends)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, counts: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.counts = counts
        out: Tensor = grouped_rows(x, weights.transpose(-2, -1), counts)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weights = ctx.saved_tensors
        of_x = grouped_rows(gradient, weights, ctx.counts)
        return of_x, grouped_outer(gradient, x, ctx.counts), None


@library.custom_op("meshwright::grouped_rows", mutates_args=())
def grouped_rows(x: Tensor, matrices: Tensor, counts: Sequence[int]) -> Tensor:
    """Return [N, M]: each run of rows of x [N, K] times its own of the matrices [E, K, M]."""
    out = x.new_empty((x.shape[0], matrices.shape[2]))
    for expert, (begin, end) in _runs(counts):
        torch.mm(x[begin:end], matrices[expert], out=out[begin:end])
    return out


@grouped_rows.register_fake
def _(x: Tensor, matrices: Tensor, counts: Sequence[int]) -> Tensor:
    del counts
    return x.new_empty((x.shape[0], matrices.shape[2]))


@library.custom_op("meshwright::grouped_outer", mutates_args=())
def grouped_outer(left: Tensor, right: Tensor, counts: Sequence[int]) -> Tensor:
    """Return [E, M, K]: left^T [M, N] times right [N, K] of each run; 0 where a run is empty."""
    out = left.new_zeros((len(counts), left.shape[1], right.shape[1]))
    for expert, (begin, end) in _runs(counts):
        torch.mm(left[begin:end].t(), right[begin:end], out=out[expert])
    return out


@grouped_outer.register_fake
def _(left: Tensor, right: Tensor, counts: Sequence[int]) -> Tensor:
    return left.new_empty((len(counts), left.shape[1], right.shape[1]))


def _runs(counts: Sequence[int]) -> list[tuple[int, tuple[int, int]]]:
    """Return the expert and the (begin, end) of each run that is not empty."""
    bounds = pairwise(accumulate(counts, initial=0))
    return [(expert, run) for expert, run in enumerate(bounds) if run[0] < run[1]]
