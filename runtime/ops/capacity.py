"""A limit of how many tokens of a sequence an expert takes: the only way that any are dropped.

Of each sequence an expert takes

    capacity = ceil(factor * tokens of the sequence * experts per token / experts)

choices, those of earlier tokens first; the others are dropped: their answers count as zero, nothing
is scaled up for them, and neither rows nor weights of theirs travel. A limit per sequence does not
depend on how a batch is cut into micro-batches and ranks, as one per micro-batch or rank would.
The balance loss and the routers' corrections see all choices, dropped ones included.

Ranks that hold parts of a sequence (axes "tp" and "cp") gather each other's choices, 8 bytes each,
and all work out the same.

Source: capacity and token-dropping, Fedus et al., arXiv:2101.03961, section 2.2, there per batch.

Shapes: B sequences, S of their tokens on this rank, k experts per token.
"""

import math
from fractions import Fraction

import torch
from torch import Tensor

from runtime.communication import collectives
from runtime.communication.mesh import Mesh
from runtime.context import context_positions


def kept_choices(experts: Tensor, num_experts: int, factor: float, mesh: Mesh) -> Tensor:
    """Return which choices of this rank's tokens are within their experts' capacity: [B, S, k].

    Args:
        experts: [B, S, k], chosen.
        num_experts: All there are.
        factor: Capacity over the mean number of choices per expert.
        mesh: Where this rank stands.

    """
    part = experts.shape[1]
    of_rank = _side_by_side(experts, mesh, "tp")
    shares = _side_by_side(of_rank, mesh, "cp")
    places = torch.cat(
        [context_positions(shares.shape[1], mesh.layout, rank) for rank in range(mesh.size("cp"))]
    ).to(experts.device)
    whole = torch.empty_like(shares).index_copy_(1, places, shares)
    capacity = capacity_of(factor, whole.shape[1] * whole.shape[2], num_experts)
    kept = _turns(whole.flatten(1), num_experts).view(whole.shape) < capacity
    own = kept.index_select(1, places).chunk(mesh.size("cp"), 1)[mesh.coordinate("cp")]
    return own.narrow(1, part * mesh.coordinate("tp"), part)


def capacity_of(factor: float, num_choices: int, num_experts: int) -> int:
    """Return how many of a sequence's choices an expert takes.

    The factor is taken as it is written: 1.1 of 50 is 55, where 1.1 * 50 is a little more in binary
    and would be rounded up to 56.

    Args:
        factor: Capacity over the mean number of choices per expert.
        num_choices: Tokens of the sequence times experts per token.
        num_experts: All there are.

    """
    return math.ceil(Fraction(str(factor)) * num_choices / num_experts)


def _side_by_side(experts: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """Concatenate the choices of an axis's ranks along the tokens."""
    group = mesh.group(axis)
    if group.size == 1:
        return experts
    gathered = experts.new_empty((group.size, *experts.shape))
    own = experts.contiguous().view(-1)
    collectives.start_all_gather(gathered.view(-1), own, group).wait()
    return torch.cat(list(gathered), dim=1)


def _turns(chosen: Tensor, num_experts: int) -> Tensor:
    """Return, for each choice of a sequence [B, N], how many before it fell on its expert."""
    order = chosen.argsort(dim=1, stable=True)
    by_expert = chosen.gather(1, order)
    counts = torch.zeros(len(chosen), num_experts, dtype=torch.long, device=chosen.device)
    counts.scatter_add_(1, chosen, torch.ones_like(chosen))
    starts = counts.cumsum(1) - counts
    turns = torch.arange(chosen.shape[1], device=chosen.device) - starts.gather(1, by_expert)
    return torch.empty_like(turns).scatter_(1, order, turns)
