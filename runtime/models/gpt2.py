"""Decoder of the GPT-2 family: LayerNorm, learned positions, biases, fused query-key-value.

Parameter names and layouts are those of Hugging Face's `GPT2LMHeadModel`, whose projections store
their weights as [in, out].

Shapes: B sequences, S tokens, H hidden, A heads, D width of a head.
"""

from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own idiom)
from torch import Tensor, nn

from costmodels.model import ModelSpec


class Projection(nn.Module):
    """x @ weight + bias, with the weight stored as [in, out] (`Conv1D` in Hugging Face)."""

    def __init__(self, width_in: int, width_out: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width_in, width_out))
        nn.init.normal_(self.weight, std=0.02)
        self.bias = nn.Parameter(torch.zeros(width_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Project the last dim."""
        return F.linear(x, self.weight.t(), self.bias)


class Attention(nn.Module):
    """Causal attention with as many key and value heads as query heads."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        width = spec.num_attention_heads * spec.head_dim
        self.width = width
        self.c_attn = Projection(spec.hidden_size, 3 * width, bias=spec.qkv_bias)
        self.c_proj = Projection(width, spec.hidden_size, bias=spec.attention_output_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Attend: [B, S, H] to [B, S, H]."""
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (
            part.view(heads).transpose(1, 2) for part in self.c_attn(x).split(self.width, dim=-1)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.c_proj(out.transpose(1, 2).reshape(*x.shape[:2], -1))
        return result


class FeedForward(nn.Module):
    """Two projections with a GELU between."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.c_fc = Projection(spec.hidden_size, spec.ffn_hidden_size, bias=spec.ffn_bias)
        self.c_proj = Projection(spec.ffn_hidden_size, spec.hidden_size, bias=spec.ffn_bias)
        # GPT-2's own activation (`gelu_new`) is the tanh form.
        self.activation = partial(F.gelu, approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token: [B, S, H] to [B, S, H]."""
        result: Tensor = self.c_proj(self.activation(self.c_fc(x)))
        return result


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(spec.hidden_size, eps=spec.norm_epsilon)
        self.attn = Attention(spec)
        self.ln_2 = nn.LayerNorm(spec.hidden_size, eps=spec.norm_epsilon)
        self.mlp = FeedForward(spec)

    def forward(self, x: Tensor) -> Tensor:
        """Transform the residual stream: [B, S, H] to [B, S, H]."""
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x  # noqa: RET504 (typed: a module call is Any)


class Decoder(nn.Module):
    """Embeddings, layers, final norm; `transformer.` in Hugging Face's names."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.wte = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.wpe = nn.Embedding(spec.num_position_embeddings, spec.hidden_size)
        self.h = nn.ModuleList(Layer(spec) for _ in range(spec.num_layers))
        self.ln_f = nn.LayerNorm(spec.hidden_size, eps=spec.norm_epsilon)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return the hidden state [B, S, H] of tokens [B, S]."""
        x: Tensor = self.wte(input_ids) + self.wpe(position_ids)
        for layer in self.h:
            x = layer(x)
        x = self.ln_f(x)
        return x  # noqa: RET504 (typed: a module call is Any)


class Gpt2(nn.Module):
    """A causal language model: tokens [B, S] to logits [B, S, V]."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.transformer = Decoder(spec)
        self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        if spec.tied_embeddings:
            self.lm_head.weight = self.transformer.wte.weight

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.lm_head(self.transformer(input_ids, position_ids))
        return logits
