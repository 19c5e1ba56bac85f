"""Backward in two halves: gradients of inputs now, those of weights later (actions I and W).

Zero-bubble schedules fill their bubbles with weight gradients, which nobody waits for. Here a
linear layer's backward computes the gradient of its input at once and puts the product that makes
its weight's gradient aside; `WeightGradients.compute` does it when the schedule says so. Norms,
biases and embeddings are small: their gradients come with the first half.

Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 2.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own idiom)
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.fx import GraphModule

Key = tuple[int, int]  # stage, micro-batch

_LINEAR = torch.ops.aten.linear.default
_ATTRIBUTE = "weight_gradients"


class Half(Enum):
    """Which half of a split backward runs."""

    INPUT = "I"
    WEIGHT = "W"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """A weight gradient still to compute: gradient^T input, for the weight behind an edge."""

    weight: GradientEdge
    gradient: Tensor
    source: Tensor

    def value(self) -> Tensor:
        return self.gradient.flatten(0, -2).T @ self.source.flatten(0, -2)


class WeightGradients(nn.Module):
    """Weight gradients that were put off, by stage and micro-batch.

    A module without parameters, so that a graph can name it as one of its own.
    """

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()
        self._waiting: dict[Key, list[_Product]] = {}
        self._key: Key | None = None

    @contextmanager
    def deferring(self, key: Key) -> Iterator[None]:
        """Put off what the backward inside this block would compute of weights."""
        self._key = key
        self._waiting[key] = []
        try:
            yield
        finally:
            self._key = None

    def compute(self, key: Key) -> None:
        """Compute what was put off and let autograd accumulate it, hooks included.

        One weight at a time: all gradients of a stage at once would be its weights once more.
        """
        by_weight: dict[GradientEdge, list[_Product]] = {}
        for product in self._waiting.pop(key):
            by_weight.setdefault(product.weight, []).append(product)
        for weight in list(by_weight):
            products = by_weight.pop(weight)
            torch.autograd.backward([weight] * len(products), [one.value() for one in products])

    def take(self, product: _Product) -> bool:
        """Put a product off, if the backward that runs is the first half."""
        if self._key is None:
            return False
        self._waiting[self._key].append(product)
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> "WeightGradients":
        """Return itself: copies of a graph put off to the same place."""
        return self


def split_linears(unit: GraphModule, put_off: WeightGradients) -> None:
    """Make the linear layers of a unit able to put their weight gradients off.

    before   linear(x, weight, bias)
    after    split_linear(x, weight, bias, put_off)
    """
    unit.add_submodule(_ATTRIBUTE, put_off)
    graph = unit.graph
    for node in graph.find_nodes(op="call_function", target=_LINEAR):
        with graph.inserting_before(node):
            place = graph.get_attr(_ATTRIBUTE)
        bias = node.args[2] if len(node.args) > 2 else None  # noqa: PLR2004  (x, weight, bias)
        node.target = split_linear
        node.args = (*node.args[:2], bias, place)
    unit.recompile()


def split_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, put_off: WeightGradients
) -> Tensor:
    """Return x weight^T + bias; its backward can put the weight's gradient off."""
    if not torch.is_grad_enabled() or not weight.requires_grad:
        return F.linear(x, weight, bias)
    keep = cast("Callable[..., tuple[Tensor, Any]]", _Operands.apply)
    multiply = cast("Callable[..., Tensor]", _SplitLinear.apply)
    same_x, operands = keep(x, weight)
    return multiply(same_x, weight, bias, operands, get_gradient_edge(weight), put_off)


class _Operands(torch.autograd.Function):
    """Keep what backward needs before the product is computed, as torch's own layers do.

    A function's tensors are kept when its forward is over. Recomputation of a layer stops as soon
    as it has all that was kept, so that it would compute the last product for nothing.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  (autograd contexts take any attribute)
        x: Tensor,
        weight: Tensor,
    ) -> tuple[Tensor, Any]:
        ctx.save_for_backward(x, weight)
        return x.view_as(x), ctx

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401  (autograd contexts take any attribute)
        gradient: Tensor,
        nothing: None,
    ) -> tuple[Tensor, None]:
        del ctx, nothing
        return gradient, None


class _SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917  (autograd passes by position)
        ctx: Any,  # noqa: ANN401  (autograd contexts take any attribute)
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        operands: Any,  # noqa: ANN401  (the context that keeps x and the weight)
        edge: GradientEdge,
        put_off: WeightGradients,
    ) -> Tensor:
        ctx.place = (operands, edge, put_off)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401  (autograd contexts take any attribute)
        gradient: Tensor,
    ) -> tuple[Tensor | None, ...]:
        operands, edge, put_off = ctx.place
        x, weight = operands.saved_tensors
        # Of the values alone: with its history, an input would keep the stage's graph, and so the
        # gradient of the stage's input, until the product is computed.
        product = _Product(weight=edge, gradient=gradient, source=x.detach())
        of_x = gradient @ weight if ctx.needs_input_grad[0] else None
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        of_weight = None if put_off.take(product) else product.value()
        return of_x, of_weight, of_bias, None, None, None
