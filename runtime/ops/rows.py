"""Rows of a matrix change places; forward and backward are both gathers or both plain writes.

    spread   each row k times, sorted by where it goes     adjoint: the k copies are summed in order
    take     x[places]                                     adjoint: put
    put      zeros; out[places] = x                        adjoint: take

torch's own indexing adds gradients row by row, in no fixed order on a GPU; no row is written twice
here, so results do not depend on it.
"""

# ruff: noqa: ANN401  (autograd contexts take any attribute)

from collections.abc import Callable  # noqa: TC003  (imports look alike everywhere)
from typing import Any, cast

import torch
from torch import Tensor


def spread(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Return the copies of rows in a given order.

    Args:
        x: [T, H].
        order: [T * k], a permutation: copy c is one of row c // k.
        inverse: The inverse permutation.

    """
    return _apply(_Spread, x, order, inverse)


def take(x: Tensor, places: Tensor) -> Tensor:
    """Return the rows at some places, none of which occurs twice."""
    return _apply(_Take, x, places)


def put(x: Tensor, places: Tensor, num_rows: int) -> Tensor:
    """Return `num_rows` rows: those given at their places, zeros elsewhere."""
    return _apply(_Put, x, places, num_rows)


def _apply(function: type[torch.autograd.Function], *arguments: object) -> Tensor:
    apply = cast("Callable[..., Tensor]", function.apply)
    return apply(*arguments)


def _written(x: Tensor, places: Tensor, num_rows: int) -> Tensor:
    return x.new_zeros((num_rows, *x.shape[1:])).index_copy_(0, places, x)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.num_rows = x.shape[0]
        copies = order.shape[0] // x.shape[0]
        return x.index_select(0, order // copies)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        by_row = gradient.index_select(0, inverse)
        return torch.unflatten(by_row, 0, (ctx.num_rows, -1)).sum(1), None, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.num_rows = x.shape[0]
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return _written(gradient, places, ctx.num_rows), None


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(places)
        return _written(x, places, num_rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return gradient.index_select(0, places), None, None
