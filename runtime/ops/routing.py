"""Which experts each token visits, and how much each one's answer counts.

    score     softmax or sigmoid of the router's logits, in fp32 or wider
    choose    the top k by score, plus a correction that the weights do not see (DeepSeek-V3);
              with groups, only experts of a token's best groups, each judged by its best expert,
              or by its best two where there is a correction
    weigh     the chosen scores, scaled to sum to one if `normalize`, times `scaling`

Sources: Mixtral, arXiv:2401.04088, section 2.1; DeepSeek-V2, arXiv:2405.04434, section 2.2;
DeepSeek-V3, arXiv:2412.19437, section 2.1.2 and its published inference code.

Shapes: T tokens, E experts, k experts per token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Keeps a division by a sum of sigmoids finite; that of DeepSeek-V3's published code.
_SMALLEST_SUM = 1e-20


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The rule by which tokens choose experts: fields of `MixtureOfExperts` under the same names.

    Attributes:
        top_k: Experts per token.
        balance: Weight of the balance loss per token (`balance.py`); 0 leaves it out.

    """

    top_k: int
    scoring: str = "softmax"
    normalize: bool = True
    scaling: float = 1.0
    num_groups: int = 1
    groups_per_token: int = 1
    balance: float = 0.0


def scores_of(logits: Tensor, routing: Routing) -> Tensor:
    """Return every expert's score [T, E], in fp32 or wider."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide.sigmoid() if routing.scoring == "sigmoid" else wide.softmax(-1)


def choose(scores: Tensor, correction: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return the experts [T, k] that each token visits, and their weights [T, k].

    Args:
        scores: From `scores_of`.
        correction: [E], added for the choice only.
        routing: The rule.

    """
    ranked = scores.detach()
    if correction is not None:
        ranked = ranked + correction
    if routing.num_groups > 1:
        ranked = _within_best_groups(ranked, routing, judges=1 if correction is None else 2)
    experts = ranked.topk(routing.top_k, dim=-1).indices
    weights = scores.gather(-1, experts)
    if routing.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _SMALLEST_SUM)
    return experts, weights * routing.scaling


def _within_best_groups(ranked: Tensor, routing: Routing, *, judges: int) -> Tensor:
    """Bar the experts outside of each token's best groups."""
    groups = torch.unflatten(ranked, -1, (routing.num_groups, -1))
    judges = min(judges, groups.shape[-1])
    merit = groups.topk(judges, dim=-1).values.sum(-1)
    best = merit.topk(routing.groups_per_token, dim=-1).indices
    allowed = torch.zeros_like(merit, dtype=torch.bool).scatter_(-1, best, value=True)
    return groups.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(-2)
