"""Decoder of the Llama family: RMSNorm, rotary positions, grouped queries, gated feed-forward.

Covers Llama, Mistral, Qwen2 (biases on queries, keys, values) and Qwen3 (a norm on each query and
key head). Parameter names are those of Hugging Face's `LlamaForCausalLM`.

Shapes: B sequences, S tokens, H hidden, A heads, G key and value heads, D width of a head.
"""

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own idiom)
from torch import Tensor, nn

from costmodels.model import ModelSpec
from runtime.models import rope


class RmsNorm(nn.Module):
    """x / rms(x) * weight over the last dim."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalise."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


class Attention(nn.Module):
    """Causal attention with grouped keys and values."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.grouped = spec.num_kv_heads != spec.num_attention_heads
        query = spec.num_attention_heads * spec.head_dim
        key = spec.num_kv_heads * spec.head_dim
        self.q_proj = nn.Linear(spec.hidden_size, query, bias=spec.qkv_bias)
        self.k_proj = nn.Linear(spec.hidden_size, key, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(spec.hidden_size, key, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(query, spec.hidden_size, bias=spec.attention_output_bias)
        normed = spec.qk_norm == "per-head"
        self.q_norm = RmsNorm(spec.head_dim, spec.norm_epsilon) if normed else nn.Identity()
        self.k_norm = RmsNorm(spec.head_dim, spec.norm_epsilon) if normed else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend: [B, S, H] to [B, S, H]; cos, sin [B, 1, S, D]."""
        heads = (*x.shape[:2], -1, self.head_dim)
        q = self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        q, k = rope.rotate(q, cos, sin), rope.rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        result: Tensor = self.o_proj(out.transpose(1, 2).reshape(*x.shape[:2], -1))
        return result


class GatedFeedForward(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        hidden, ffn = spec.hidden_size, spec.ffn_hidden_size
        self.gate_proj = nn.Linear(hidden, ffn, bias=spec.ffn_bias)
        self.up_proj = nn.Linear(hidden, ffn, bias=spec.ffn_bias)
        self.down_proj = nn.Linear(ffn, hidden, bias=spec.ffn_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token: [B, S, H] to [B, S, H]."""
        result: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(spec.hidden_size, spec.norm_epsilon)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = RmsNorm(spec.hidden_size, spec.norm_epsilon)
        self.mlp = GatedFeedForward(spec)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Transform the residual stream: [B, S, H] to [B, S, H]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x  # noqa: RET504 (typed: a module call is Any)


class Decoder(nn.Module):
    """Embedding, layers, final norm; `model.` in Hugging Face's names."""

    frequencies: Tensor

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(Layer(spec) for _ in range(spec.num_layers))
        self.norm = RmsNorm(spec.hidden_size, spec.norm_epsilon)
        theta = 10000.0 if spec.rope_theta is None else spec.rope_theta
        frequencies = rope.inverse_frequencies(spec.head_dim, theta, dict(spec.rope_scaling))
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return the hidden state [B, S, H] of tokens [B, S]."""
        x: Tensor = self.embed_tokens(input_ids)
        cos, sin = rope.tables(position_ids, self.frequencies, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        x = self.norm(x)
        return x  # noqa: RET504 (typed: a module call is Any)


class Llama(nn.Module):
    """A causal language model: tokens [B, S] to logits [B, S, V]."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.model = Decoder(spec)
        self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        if spec.tied_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.lm_head(self.model(input_ids, position_ids))
        return logits
