"""Multi-head latent attention: queries, keys and values are made from compressed forms.

    query        q_b(norm(q_a(x))), or q(x) where nothing is compressed
    key, value   kv_b(norm(c)), with c and one rotary key for all heads out of kv_a(x)
    head         [part without position, part that rotates]; values may be narrower than keys

Parameter names are those of Hugging Face's DeepSeek modules. Its rotary parts rotate neighbours
(x0, x1), (x2, x3), ... and not halves.

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1; the scale of YaRN: DeepSeek's published code.

Shapes: B sequences, S tokens, H hidden, A heads, D = qk_nope + qk_rope width of query and key.
"""

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own idiom)
from torch import Tensor, nn

from costmodels.model import LatentAttention as Widths
from costmodels.model import ModelSpec
from runtime.models import rope
from runtime.models.rms_norm import RmsNorm

# Of the norms on compressed forms, whatever the model's own. Source: DeepSeek's published code.
_LATENT_EPSILON = 1e-6


class LatentAttention(nn.Module):
    """Causal attention over keys and values that share one compressed form."""

    def __init__(self, spec: ModelSpec, widths: Widths) -> None:
        super().__init__()
        self.widths = widths
        heads, hidden, bias = spec.num_attention_heads, spec.hidden_size, spec.qkv_bias
        self.scale = rope.attention_scale(widths.qk_head_dim, dict(spec.rope_scaling))
        rank = widths.q_lora_rank
        if rank is None:
            self.q_proj = nn.Linear(hidden, heads * widths.qk_head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, rank, bias=bias)
            self.q_a_layernorm = RmsNorm(rank, _LATENT_EPSILON)
            self.q_b_proj = nn.Linear(rank, heads * widths.qk_head_dim, bias=False)
        compressed = widths.kv_lora_rank + widths.qk_rope_head_dim
        self.kv_a_proj_with_mqa = nn.Linear(hidden, compressed, bias=bias)
        self.kv_a_layernorm = RmsNorm(widths.kv_lora_rank, _LATENT_EPSILON)
        expanded = heads * (widths.qk_nope_head_dim + widths.v_head_dim)
        self.kv_b_proj = nn.Linear(widths.kv_lora_rank, expanded, bias=False)
        self.o_proj = nn.Linear(heads * widths.v_head_dim, hidden, bias=spec.attention_output_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend: [B, S, H] to [B, S, H]; cos, sin [B, 1, S, qk_rope]."""
        widths = self.widths
        nope, turned = widths.qk_nope_head_dim, widths.qk_rope_head_dim
        heads = (*x.shape[:2], -1)
        query = self._query(x).view(*heads, widths.qk_head_dim).transpose(1, 2)
        plain, turning = torch.split(query, [nope, turned], dim=-1)
        query = torch.cat((plain, rope.rotate_neighbours(turning, cos, sin)), dim=-1)
        latent, turning = self.kv_a_proj_with_mqa(x).split([widths.kv_lora_rank, turned], dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent))
        expanded = expanded.view(*heads, nope + widths.v_head_dim).transpose(1, 2)
        plain, value = expanded.split([nope, widths.v_head_dim], dim=-1)
        shared = rope.rotate_neighbours(turning.unsqueeze(1), cos, sin)
        key = torch.cat((plain, shared.expand(-1, plain.shape[1], -1, -1)), dim=-1)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale)
        result: Tensor = self.o_proj(out.transpose(1, 2).reshape(*x.shape[:2], -1))
        return result

    def _query(self, x: Tensor) -> Tensor:
        if self.widths.q_lora_rank is None:
            query: Tensor = self.q_proj(x)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        return query
