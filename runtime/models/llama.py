"""Decoder of the Llama family: RMSNorm, rotary positions, grouped queries, gated feed-forward.

Covers Llama, Mistral, Qwen2 (biases on queries, keys, values), Qwen3 (a norm on each query and
key head), their relatives with experts (Mixtral, Qwen2-MoE, Qwen3-MoE), and DeepSeek-V2 and V3
(latent attention). Parameter names are those of Hugging Face's modules of these families.

Shapes: B sequences, S tokens, H hidden, A heads, G key and value heads, D width of a head.
"""

import torch.nn.functional as F  # noqa: N812 (torch's own idiom)
from torch import Tensor, nn

from costmodels.model import ModelSpec
from runtime.models import rope
from runtime.models.feed_forward import feed_forward
from runtime.models.latent_attention import LatentAttention
from runtime.models.rms_norm import RmsNorm


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


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, spec: ModelSpec, index: int) -> None:
        super().__init__()
        latent = spec.latent_attention
        self.input_layernorm = RmsNorm(spec.hidden_size, spec.norm_epsilon)
        self.self_attn = Attention(spec) if latent is None else LatentAttention(spec, latent)
        self.post_attention_layernorm = RmsNorm(spec.hidden_size, spec.norm_epsilon)
        self.mlp = feed_forward(spec, index)

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
        self.layers = nn.ModuleList(Layer(spec, index) for index in range(spec.num_layers))
        self.norm = RmsNorm(spec.hidden_size, spec.norm_epsilon)
        theta = 10000.0 if spec.rope_theta is None else spec.rope_theta
        latent = spec.latent_attention
        width = spec.head_dim if latent is None else latent.qk_rope_head_dim
        frequencies = rope.inverse_frequencies(width, theta, dict(spec.rope_scaling))
        self.magnitude = rope.magnitude(dict(spec.rope_scaling))
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return the hidden state [B, S, H] of tokens [B, S]."""
        x: Tensor = self.embed_tokens(input_ids)
        cos, sin = rope.tables(position_ids, self.frequencies, x.dtype, self.magnitude)
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
