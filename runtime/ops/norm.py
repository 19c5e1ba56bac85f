"""RMSNorm that keeps only its input and one statistic per row, on every device.

    r = 1 / sqrt(mean(x^2) + eps)          y = x * r * w
    dx = r * (g w - x r^2 mean(g w x))     dw = sum over rows of g x r

torch's own `rms_norm` does so on CUDA; on the CPU it is a chain of operations that keeps several
fp32 copies. As an operator of our own it is one node in a graph, keeps the same values everywhere
and has a shape rule, so that a dry run sees what a GPU would hold. Where nobody watches, the same
functions run without the operator, whose dispatch through Python costs a small norm several times
its arithmetic (0.27 ms forward and 0.38 ms backward, measured).

Source: Zhang and Sennrich, arXiv:1910.07467, equation 4.
"""

# ruff: noqa: ANN401  (autograd contexts take any attribute)

from typing import Any

import torch
from torch import Tensor, library


def _normalised(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the normalised tensor and r [..., 1] in fp32 or wider."""
    if x.is_cuda:
        fused = torch.ops.aten._fused_rms_norm  # noqa: SLF001 (what torch's rms_norm calls)
        normed, scale = fused(x, list(weight.shape), weight, epsilon)
        return normed, scale
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
    scale.div_(x.shape[-1]).add_(epsilon).rsqrt_()
    return (wide * scale * weight).to(x.dtype), scale


def _gradients(gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of input and weight."""
    normed = x * scale
    weighted = gradient * weight
    rows = (weighted * normed).mean(-1, keepdim=True, dtype=scale.dtype)
    of_input = scale * (weighted - normed * rows)
    of_weight = (gradient * normed).flatten(0, -2).sum(0)
    return of_input.to(x.dtype), of_weight.to(weight.dtype)


_forward = library.custom_op("meshwright::rms_norm", _normalised, mutates_args=())
_backward = library.custom_op("meshwright::rms_norm_backward", _gradients, mutates_args=())


@_forward.register_fake
def _(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    del weight, epsilon
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=wide)


@_backward.register_fake
def _(gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    del gradient, scale
    return torch.empty_like(x), torch.empty_like(weight)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        normalised = _forward if _is_watched(x) else _normalised
        normed, scale = normalised(x, weight, epsilon)
        ctx.save_for_backward(x, weight, scale)
        return normed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        gradients = _backward if _is_watched(gradient) else _gradients
        return *gradients(gradient, *ctx.saved_tensors), None


def _is_watched(x: Tensor) -> bool:
    """Whether a mode (a tracker, fake tensors, a tracer) or the tensor wants to see operators."""
    modes: int = torch._C._len_torch_dispatch_stack()  # noqa: SLF001 (as torch's own modes ask)
    return bool(modes) or type(x) is not Tensor


def rms_norm(x: Tensor, shape: list[int], weight: Tensor, epsilon: float) -> Tensor:
    """Return x / rms(x) * weight over the last dim; the arguments are those of torch's.

    Args:
        x: [..., H].
        shape: [H].
        weight: [H].
        epsilon: Added to the mean of squares.

    """
    assert list(shape) == [x.shape[-1]], f"rms_norm over {shape} of {tuple(x.shape)}"
    apply: Any = _RmsNorm.apply
    normed: Tensor = apply(x, weight, epsilon)
    return normed
