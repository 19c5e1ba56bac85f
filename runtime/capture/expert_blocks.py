"""Blocks of experts of `transformers`, captured as the one operator that lowering knows.

Their own forward loops over the experts that tokens happened to choose, which no trace can follow.
While a model is captured, these blocks compute `meshwright::experts` from the same parameters;
what the router and the experts do is read off the modules, and what differs is refused. The model
is left as it was.

Source: `transformers` 5.24, models/mixtral/modeling_mixtral.py and qwen3_moe/modeling_qwen3_moe.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch.nn.functional as F  # noqa: N812 (torch's own idiom)
from torch import Tensor, nn

from runtime.ops.experts import whole_experts
from runtime.ops.routing import Routing

# By the name of the class, since importing `transformers` takes seconds and it may not be there.
BLOCKS = ("MixtralSparseMoeBlock", "Qwen3MoeSparseMoeBlock")


@contextmanager
def experts_as_operators(model: nn.Module) -> Iterator[None]:
    """Let a model's blocks of experts be traced as single operators.

    Raises:
        ValueError: A block does what the operator does not.

    """
    blocks = {
        name: block for name, block in model.named_modules() if type(block).__name__ in BLOCKS
    }
    for name, block in blocks.items():
        # An attribute of the instance hides the class's method and is no module or parameter.
        block.__dict__["forward"] = partial(_forward, block, _routing_of(name, block))
    try:
        yield
    finally:
        for block in blocks.values():
            del block.__dict__["forward"]


def _forward(block: nn.Module, routing: Routing, hidden_states: Tensor) -> Tensor:
    router, experts = block.get_submodule("gate"), block.get_submodule("experts")
    result: Tensor = whole_experts(
        hidden_states,
        router.weight,
        None,
        experts.gate_up_proj,
        experts.down_proj,
        routing.top_k,
        routing.scoring,
        routing.normalize,
        routing.scaling,
        routing.num_groups,
        routing.groups_per_token,
        routing.balance,
    )
    return result


def _routing_of(name: str, block: nn.Module) -> Routing:
    if getattr(block, "jitter_noise", 0):
        raise ValueError(f"{name} disturbs its input at random (jitter_noise); set it to 0")
    activation = getattr(block.get_submodule("experts"), "act_fn", None)
    is_silu = activation is F.silu or type(activation).__name__ in ("SiLU", "SiLUActivation")
    if not is_silu:
        raise ValueError(f"{name}: experts of activation {activation}; the runtime has silu")
    router = block.get_submodule("gate")
    # Mixtral always scales the chosen weights to sum to one and has no switch for it.
    normalize = getattr(router, "norm_topk_prob", True)
    return Routing(top_k=int(router.top_k), normalize=bool(normalize))  # type: ignore[arg-type]  # a module's plain attribute
