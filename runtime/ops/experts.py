"""A feed-forward block of routed experts, whole or spread over ranks.

No token is ever dropped, unless a capacity is asked for (`capacity.py`).

    route       every token chooses its experts                               `routing.py`
    dispatch    copies of tokens, sorted by expert, go to the ranks that hold the experts: counts
                first, then rows, by all-to-alls with uneven sizes
    compute     down(silu(gate(x)) * up(x)), one grouped product each         `grouped.py`
    combine     answers return the same way and are weighed and summed

Experts lie in blocks on the ranks of axis "ep". Axis "etp" cuts the width of each one: its ranks
gather one another's tokens, padded to the longest, and scatter the sums of their partial answers.

For capture the block is one operator, as its shapes depend on values; lowering puts
`dispatched_experts` in its place, which autograd sees through.

Sources: Shazeer et al., arXiv:1701.06538; dropless dispatch: Gale et al., arXiv:2211.15841;
folding of the expert axes over tensor, context and data: Liu et al., arXiv:2504.14960.

Shapes: T tokens, k experts per token, E experts (e on this rank), H hidden, F width of an expert.
"""

# ruff: noqa: ANN401, PLR0917  (operators take plain values by position)

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own idiom)
from torch import Tensor, library

from runtime.communication import collectives
from runtime.communication.mesh import Mesh
from runtime.ops.balance import balanced
from runtime.ops.capacity import kept_choices
from runtime.ops.grouped import grouped_linear
from runtime.ops.routing import Routing, choose, scores_of
from runtime.ops.rows import put, spread, take
from runtime.ops.traffic import Traffic, local_counts, meet


def dispatched_experts(
    x: Tensor,
    router: Tensor,
    correction: Tensor | None,
    gate_up: Tensor,
    down: Tensor,
    mesh: Mesh | None,
    token_weight: Tensor | float,
    load: Tensor | None,
    *rule: Any,
    capacity: float = 0.0,
    dropped: Tensor | None = None,
) -> Tensor:
    """Return the weighted answers of each token's experts.

    Args:
        x: [..., H], this rank's tokens; no other rank has them.
        router: [E, H].
        correction: [E], added to scores where experts are chosen.
        gate_up: [e, 2 F / etp, H], both input matrices of the experts of this rank.
        down: [e, H, F / etp].
        mesh: Where this rank stands; None for the whole block in one process, without the balance
            loss.
        token_weight: What the step's loss multiplies each token's by.
        load: [E], to which the choices of this rank's tokens are added where anybody wants to know
            (`training/expert_bias.py`); recomputation adds them again.
        rule: The fields of `Routing`, in order.
        capacity: What an expert takes of a sequence over the mean; 0 takes all.
        dropped: [2], to which choices that were dropped, and all, are added where there is a
            capacity; recomputation adds them again.

    """
    tokens, lead = x.reshape(-1, x.shape[-1]), (*x.shape[:-1], -1)
    routing = _routing(*rule)
    scores = scores_of(F.linear(tokens, router), routing)
    experts, weights = choose(scores, correction, routing)
    if mesh is not None and routing.balance:
        choice = weights.view(lead), scores.view(lead), experts.view(lead)
        weights = balanced(*choice, routing.balance * token_weight, mesh).flatten(0, -2)
    chosen, num_dropped = experts.flatten(), 0
    if capacity and mesh is not None:
        kept = kept_choices(experts.view(lead), len(router), capacity, mesh).flatten()
        num_dropped = len(kept) - int(kept.sum())  # waits for the device: rows are cut to the rest
        if dropped is not None:
            dropped += torch.tensor((num_dropped, len(kept)), device=dropped.device)
        chosen = chosen.where(kept, len(router))  # behind all others
    order = chosen.argsort(stable=True)
    inverse = order.argsort()
    counts = _counts(chosen, len(router))
    if load is not None:
        load.add_(_counts(experts.flatten(), len(router)))
    rows = spread(tokens, order, inverse)
    if num_dropped:
        rows = rows.narrow(0, 0, len(chosen) - num_dropped)
    answers = _answers(rows, counts, gate_up, down, mesh)
    if num_dropped:
        answers = F.pad(answers, (0, 0, 0, num_dropped))
    by_token = torch.unflatten(take(answers, inverse), 0, (len(tokens), -1))
    weighed = by_token * weights.to(by_token.dtype).unsqueeze(-1)
    return weighed.sum(1).view(x.shape)


def _counts(chosen: Tensor, num_experts: int) -> Tensor:
    """Return how many choices fell on each expert; those on none are left out."""
    counts = torch.zeros(num_experts + 1, dtype=torch.long, device=chosen.device)
    return counts.scatter_add_(0, chosen, torch.ones_like(chosen))[:num_experts]


def _routing(*fields: Any) -> Routing:
    names = ("top_k", "scoring", "normalize", "scaling", "num_groups", "groups_per_token")
    return Routing(**dict(zip((*names, "balance"), fields, strict=True)))


def _answers(
    rows: Tensor, counts: Tensor, gate_up: Tensor, down: Tensor, mesh: Mesh | None
) -> Tensor:
    """Return what the experts say of rows that are sorted by expert, here or on other ranks."""
    if mesh is None or mesh.size("ep") * mesh.size("etp") == 1:
        return _compute(rows, gate_up, down, local_counts(counts, len(rows)))
    return _visit(rows, gate_up, down, meet(counts, len(rows), mesh), mesh)


def _compute(rows: Tensor, gate_up: Tensor, down: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Run this rank's experts on rows that are sorted by expert."""
    gate, up = grouped_linear(rows, gate_up, counts).chunk(2, dim=-1)
    return grouped_linear(F.silu(gate) * up, down, counts)


def _visit(rows: Tensor, gate_up: Tensor, down: Tensor, traffic: Traffic, mesh: Mesh) -> Tensor:
    """Send rows to the ranks of their experts and return the answers in the rows' order."""
    arrived = collectives.all_to_all(rows, mesh, "ep", traffic.received, traffic.sent)
    padding = traffic.longest - arrived.shape[0]
    padded = F.pad(arrived, (0, 0, 0, padding)) if padding else arrived
    gathered = collectives.all_gather(padded, mesh, "etp", 0)
    answers = _compute(take(gathered, traffic.places), gate_up, down, traffic.rows_of_expert)
    partial = put(answers, traffic.places, gathered.shape[0])
    summed = collectives.reduce_scatter(partial, mesh, "etp", 0)
    own = summed.narrow(0, 0, arrived.shape[0]) if padding else summed
    return collectives.all_to_all(own, mesh, "ep", traffic.sent, traffic.received)


# The operator of captured graphs.


@library.custom_op("meshwright::experts", mutates_args=())
def whole_experts(
    x: Tensor,
    router: Tensor,
    correction: Tensor | None,
    gate_up: Tensor,
    down: Tensor,
    top_k: int,
    scoring: str,
    normalize: bool,
    scaling: float,
    num_groups: int,
    groups_per_token: int,
    balance: float,
) -> Tensor:
    """Return the answers of all experts in one process; the arguments as above and in `Routing`."""
    rule = (top_k, scoring, normalize, scaling, num_groups, groups_per_token, balance)
    return dispatched_experts(x, router, correction, gate_up, down, None, 1.0, None, *rule)


@whole_experts.register_fake
def _(x: Tensor, *rest: Any) -> Tensor:
    del rest
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs[:5])
    ctx.rule = inputs[5:]


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Compute the block again, this time seen by autograd."""
    x, router, correction, gate_up, down = ctx.saved_tensors
    x, router, gate_up, down = (t.detach().requires_grad_() for t in (x, router, gate_up, down))
    with torch.enable_grad():
        output = dispatched_experts(
            x, router, correction, gate_up, down, None, 1.0, None, *ctx.rule
        )
        found = torch.autograd.grad(output, (x, router, gate_up, down), gradient)
    return found[0], found[1], None, found[2], found[3], *(None for _ in ctx.rule)


whole_experts.register_autograd(_differentiate, setup_context=_keep)
