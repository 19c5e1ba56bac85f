"""Feed-forward blocks of the Llama family: gated, or routed experts beside an always-on one.

Parameter names are those of Hugging Face's modules; all experts of a layer are two tensors:

    mlp.gate.weight                      [E, H]         router
    mlp.gate.e_score_correction_bias     [E]            buffer, DeepSeek-V3 only
    mlp.experts.gate_up_proj             [E, 2 F, H]
    mlp.experts.down_proj                [E, H, F]
    mlp.shared_experts.*                                DeepSeek
    mlp.shared_expert.*, mlp.shared_expert_gate.weight  Qwen2-MoE

Shapes: B sequences, S tokens, H hidden, E experts, F width of one.
"""

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own idiom)
from torch import Tensor, nn

from costmodels.model import MixtureOfExperts, ModelSpec
from runtime.ops.experts import whole_experts

_DEVIATION = 0.02  # of first weights, as elsewhere in the family


class GatedFeedForward(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: ModelSpec, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, width, bias=spec.ffn_bias)
        self.up_proj = nn.Linear(spec.hidden_size, width, bias=spec.ffn_bias)
        self.down_proj = nn.Linear(width, spec.hidden_size, bias=spec.ffn_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token: [B, S, H] to [B, S, H]."""
        result: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Router(nn.Module):
    """The matrix that scores experts, and the correction of the choice where there is one."""

    e_score_correction_bias: Tensor | None

    def __init__(self, hidden_size: int, moe: MixtureOfExperts) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(moe.num_experts, hidden_size))
        nn.init.normal_(self.weight, std=_DEVIATION)
        # On the CPU even inside `torch.device("meta")`: lowering keeps buffers' values. fp32: it
        # moves by steps that bf16 would lose, and `.to(dtype)` of the model must not round it.
        correction = torch.zeros(moe.num_experts, dtype=torch.float32, device="cpu")
        self.register_buffer("e_score_correction_bias", correction if moe.correction_bias else None)


class Experts(nn.Module):
    """The matrices of all experts of a layer."""

    def __init__(self, hidden_size: int, moe: MixtureOfExperts) -> None:
        super().__init__()
        count, width = moe.num_experts, moe.ffn_hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * width, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(count, hidden_size, width))
        nn.init.normal_(self.gate_up_proj, std=_DEVIATION)
        nn.init.normal_(self.down_proj, std=_DEVIATION)


class RoutedFeedForward(nn.Module):
    """Each token's own experts, plus what every token goes through."""

    def __init__(self, spec: ModelSpec, moe: MixtureOfExperts) -> None:
        super().__init__()
        self.moe = moe
        self.gate = Router(spec.hidden_size, moe)
        self.experts = Experts(spec.hidden_size, moe)
        width = moe.shared_ffn_hidden_size
        self.shared_name = "shared_expert" if moe.shared_gate else "shared_experts"
        if width:
            self.add_module(self.shared_name, GatedFeedForward(spec, width))
        if moe.shared_gate:
            self.shared_expert_gate = nn.Linear(spec.hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token: [B, S, H] to [B, S, H]."""
        moe = self.moe
        result: Tensor = whole_experts(
            x,
            self.gate.weight,
            self.gate.e_score_correction_bias,
            self.experts.gate_up_proj,
            self.experts.down_proj,
            moe.experts_per_token,
            moe.scoring,
            moe.normalize_weights,
            moe.routed_scaling,
            moe.num_groups,
            moe.groups_per_token,
            moe.balance_loss,
        )
        if moe.shared_ffn_hidden_size:
            shared = self.get_submodule(self.shared_name)(x)
            if moe.shared_gate:
                shared = self.shared_expert_gate(x).sigmoid() * shared
            result = result + shared
        return result


def feed_forward(spec: ModelSpec, layer: int) -> GatedFeedForward | RoutedFeedForward:
    """Return the block of a layer."""
    if spec.moe is not None and spec.layer_kind(layer).has_experts:
        return RoutedFeedForward(spec, spec.moe)
    return GatedFeedForward(spec, spec.ffn_hidden_size)
