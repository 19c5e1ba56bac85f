"""A loss that evens out how many tokens each expert gets, within each sequence.

    f_i   share of the sequence's choices that fell on expert i, times the number of experts
    s_ti  score of expert i for token t, scaled to sum to one over experts
    loss  weight * sum over tokens t and experts i of f_i s_ti, counted per token like the cross
          entropy

Only the scores are differentiated, so ranks that hold parts of a sequence (axes "tp" and "cp") need
each other's choices but not each other's scores. Being a sum over sequences, the loss does not
depend on how a batch is cut into micro-batches and ranks, as one over micro-batches would.

Its value joins no output: it enters where gradients begin to flow into the router.

Source: DeepSeek-V2, arXiv:2405.04434, equations 23 to 25; DeepSeek-V3, arXiv:2412.19437, equations
17 to 20.

Shapes: B sequences, S of their tokens on this rank, E experts, k experts per token.
"""

# ruff: noqa: ANN401  (autograd contexts take any attribute)

from collections.abc import Callable  # noqa: TC003  (imports look alike everywhere)
from typing import Any, cast

import torch
from torch import Tensor

from runtime.communication import collectives
from runtime.communication.mesh import Mesh


def balanced(
    weights: Tensor, scores: Tensor, experts: Tensor, scale: Tensor | float, mesh: Mesh
) -> Tensor:
    """Return the weights of chosen experts, with the gradient of the balance loss attached.

    Args:
        weights: [B, S, k], what the experts' answers are weighed with.
        scores: [B, S, E].
        experts: [B, S, k], chosen.
        scale: The loss's weight for each token, over the tokens that the step's loss is divided by.
        mesh: Where this rank stands.

    """
    apply = cast("Callable[..., Tensor]", _Attach.apply)
    return apply(weights, balance_loss(scores, experts, mesh) * scale)


def balance_loss(scores: Tensor, experts: Tensor, mesh: Mesh) -> Tensor:
    """Return this rank's part of the loss, summed over its tokens, before its weight."""
    num_experts, per_token = scores.shape[-1], experts.shape[-1]
    chosen = experts.flatten(1)
    choices = scores.new_zeros(scores.shape[0], num_experts)
    choices.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=scores.dtype))
    num_tokens = scores.shape[1]
    for axis in ("tp", "cp"):
        choices = collectives.all_reduce(choices, mesh.group(axis))
        num_tokens *= mesh.size(axis)
    shares = choices * (num_experts / (per_token * num_tokens))
    likely = scores / scores.sum(-1, keepdim=True)
    return (likely * shares.unsqueeze(1)).sum()


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.loss = (loss.dtype, loss.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        dtype, device = ctx.loss
        return gradient, torch.ones((), dtype=dtype, device=device)
