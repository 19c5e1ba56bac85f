"""Plain modules that nobody wrote for this project, with names and shapes of their own."""

import copy

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, LENGTH, DEPTH = 67, 24, 4, 16, 4


class SelfAttention(nn.Module):
    """One matrix for queries, keys and values, as in many small GPTs."""

    def __init__(self):
        super().__init__()
        self.to_qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        parts = self.to_qkv(x).split(WIDTH, dim=2)
        q, k, v = (p.view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2) for p in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, WIDTH))


class Cell(nn.Module):
    """A block with a learned scale on each branch, which no axis of tensors cuts."""

    def __init__(self):
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = SelfAttention()
        self.widen, self.narrow = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        self.gamma = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x):
        x = x + self.gamma * self.attention(self.before_attention(x))
        return x + self.narrow(functional.gelu(self.widen(self.before_mlp(x))))


class PlainGpt(nn.Module):
    """Learned positions, tied embeddings, blocks in an nn.Sequential; takes tokens only."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.cells = nn.Sequential(*(Cell() for _ in range(DEPTH)))
        self.last_norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.out.weight = self.tokens.weight

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.places(places)
        return self.out(self.last_norm(self.cells(x)))


class Norm(nn.Module):
    """Root mean square, spelled out."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.scale * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class Mixer(nn.Module):
    """A gated block with grouped heads, and a matrix beside it that no rule cuts."""

    def __init__(self):
        super().__init__()
        self.norm_a, self.norm_b = Norm(), Norm()
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.v = nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blend = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 40, bias=False), nn.Linear(WIDTH, 40, bias=False)
        self.down = nn.Linear(40, WIDTH, bias=False)

    def forward(self, x):
        y = self.norm_a(x)
        heads = [
            part(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        ]
        y = functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        x = x + self.blend(x).tanh()
        y = self.norm_b(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class PlainMixer(nn.Module):
    """Blocks that are attributes of their own; no positions; an untied head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        for i in range(DEPTH):
            self.add_module(f"mixer_{'abcd'[i]}", Mixer())
        self.final, self.head = Norm(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for letter in "abcd":
            x = self.get_submodule(f"mixer_{letter}")(x)
        return self.head(self.final(x))


def plain_gpt():
    return PlainGpt()


def truncated():
    model = PlainGpt()
    for cell in model.cells:
        nn.init.trunc_normal_(cell.widen.weight, std=0.02, a=-0.03, b=0.03)
    return model


class Stacked(PlainGpt):
    """Copies one block, as nn.TransformerEncoder does, and makes weights out of place."""

    def __init__(self):
        super().__init__()
        first = Cell()
        self.cells = nn.Sequential(*(copy.deepcopy(first) for _ in range(DEPTH)))
        self.tokens.weight = nn.Parameter(torch.empty(VOCABULARY, WIDTH).normal_() * 0.1)
        self.out.weight = self.tokens.weight
        self.places.weight = nn.Parameter(torch.empty(LENGTH, WIDTH).normal_().cumsum(0))
        self.last_norm.bias = nn.Parameter(torch.empty(WIDTH))
        nn.init.orthogonal_(self.cells[1].narrow.weight)


def stacked():
    return Stacked()


def plain_mixer():
    return PlainMixer()


class SlicedPositions(PlainGpt):
    """Takes the first rows of its table of positions."""

    def __init__(self):
        super().__init__()
        self.places = nn.Parameter(torch.zeros(LENGTH, WIDTH))

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places[: tokens.shape[1]]
        return self.out(self.last_norm(self.cells(x)))


class SlicedBuffer(PlainGpt):
    """Adds the first rows of a table that is no parameter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("waves", torch.linspace(-1, 1, LENGTH * WIDTH).view(LENGTH, WIDTH))

    def forward(self, tokens):
        return self.out(
            self.last_norm(self.cells(self.tokens(tokens) + self.waves[: tokens.shape[1]]))
        )


def sliced_buffer():
    model = SlicedBuffer()
    del model.places
    return model


def sliced_positions():
    return SlicedPositions()


class AttentionByHand(SelfAttention):
    """Scores, a mask and a softmax, each an operation of its own."""

    def forward(self, x):
        batch, length, _ = x.shape
        parts = self.to_qkv(x).split(WIDTH, dim=2)
        q, k, v = (p.view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2) for p in parts)
        scores = q @ k.transpose(-2, -1)
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        y = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(batch, length, WIDTH))


def by_hand():
    model = PlainGpt()
    for cell in model.cells:
        cell.attention = AttentionByHand()
    return model


class KeysAreValues(SelfAttention):
    """Attends to what it returns: one matrix for queries, one for keys and values."""

    def __init__(self):
        super().__init__()
        self.to_qkv = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        parts = self.to_qkv(x).split(WIDTH, dim=2)
        q, k = (p.view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2) for p in parts)
        y = functional.scaled_dot_product_attention(q, k, k, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, WIDTH))


def keys_are_values():
    model = PlainGpt()
    for cell in model.cells:
        cell.attention = KeysAreValues()
    return model


def uneven():
    model = PlainGpt()
    model.cells[-1].widen, model.cells[-1].narrow = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
    return model


def broken():
    raise RuntimeError("out of ideas")


def no_module():
    return 1


class LoneLayer(nn.Module):
    def forward(self, tokens, mask, scale):
        return tokens * mask * scale


def lone_layer():
    return LoneLayer()
