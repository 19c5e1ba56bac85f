"""Attention in every form gives the same numbers and keeps what the form promises."""

from contextlib import nullcontext

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.ops import attention, norm

FUNCTIONS = attention.FORMS


def operands(dtype=torch.float64, length=5):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, length, 8), (2, 2, length, 8), (2, 2, length, 8))
    return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_form_is_causal_attention_with_its_gradients(function):
    q, k, v = operands()
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / 8**0.5
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    expected = weights @ v.repeat_interleave(2, 1)
    upstream = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (q, k, v), upstream)
    out = function(q, k, v)
    assert torch.allclose(out, expected, atol=1e-12)
    for got, want in zip(torch.autograd.grad(out, (q, k, v), upstream), wanted, strict=True):
        assert torch.allclose(got, want, atol=1e-12)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_values_may_be_narrower_than_keys(function):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 5, 8), (2, 4, 5, 8), (2, 4, 5, 3))
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    scores = (0.9 * q @ k.transpose(-1, -2)).masked_fill(hidden, float("-inf"))
    expected = scores.softmax(-1) @ v
    upstream = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (q, k, v), upstream)
    out = function(q, k, v, scale=0.9)
    assert torch.allclose(out, expected, atol=1e-12)
    for got, want in zip(torch.autograd.grad(out, (q, k, v), upstream), wanted, strict=True):
        assert torch.allclose(got, want, atol=1e-12)


def test_a_scale_replaces_the_usual_one():
    q, k, v = operands()
    usual = [function(q, k, v) for function in FUNCTIONS]
    scaled = [function(q, k, v, scale=8**-0.5) for function in FUNCTIONS]
    other = [function(q, k, v, scale=0.9) for function in FUNCTIONS]
    for a, b, c in zip(usual, scaled, other, strict=True):
        assert torch.allclose(a, b)
        assert not torch.allclose(a, c)


def kept_bytes(function, length):
    q, k, v = operands(torch.float32, length)
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    own = {x.untyped_storage().data_ptr() for x in (q, k, v)}
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        out = function(q, k, v)
    assert out.shape == q.shape
    return sum(size for pointer, size in kept.items() if pointer not in own)


def test_only_scores_in_memory_grow_with_the_square_of_the_length():
    square = 2 * 4 * 4  # batch, heads, bytes of fp32
    assert kept_bytes(attention.unfused_attention, 64) >= square * 64 * 64
    for function in (attention.recomputed_attention, attention.recomputed_unfused_attention):
        assert kept_bytes(function, 64) == 0
    fused = kept_bytes(attention.fused_attention, 64)
    assert fused == 2 * 4 * 64 * (8 + 1) * 4  # output, one statistic per row


def test_narrow_values_keep_nothing_as_wide_as_keys():
    q, k, both = operands(torch.float32, 64)
    k = k.repeat_interleave(2, 1)
    # As in latent attention: values are a part of what a wider product made.
    v = both.repeat_interleave(2, 1)[..., 5:]
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        out = attention.fused_attention(q, k, v)
    assert out.transpose(1, 2).is_contiguous()  # the output matrix reads it as it lies
    assert sum(kept.values()) == 2 * 4 * 64 * (8 + 8 + 3 + 3 + 1) * 4  # q, k, v, output, lse


class Watching(TorchDispatchMode):
    """Sees every operator, and changes nothing."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("watching", [nullcontext, Watching])
def test_the_norm_equals_torchs_with_its_gradients(watching):
    x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn_like(x)
    expected = torch.nn.functional.rms_norm(x, (8,), weight, 1e-5)
    wanted = torch.autograd.grad(expected, (x, weight), upstream)
    with watching():
        out = norm.rms_norm(x, [8], weight, 1e-5)
        found = torch.autograd.grad(out, (x, weight), upstream)
    assert torch.allclose(out, expected, atol=1e-12)
    for got, want in zip(found, wanted, strict=True):
        assert torch.allclose(got, want, atol=1e-12)


def test_the_norm_is_one_operator_where_a_mode_watches():
    x, weight = torch.randn(4, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    upstream = torch.randn_like(x)
    with Watching() as ahead:
        watched = norm.rms_norm(x, [64], weight, 1e-5)
    with Watching() as back:
        gradients = torch.autograd.grad(watched, (x, weight), upstream)
    assert ahead.seen == ["meshwright.rms_norm.default"]
    assert "meshwright.rms_norm_backward.default" in back.seen
    plain = norm.rms_norm(x, [64], weight, 1e-5)
    assert torch.equal(watched, plain)
    for got, want in zip(gradients, torch.autograd.grad(plain, (x, weight), upstream), strict=True):
        assert torch.equal(got, want)


def test_the_norm_keeps_its_input_and_one_number_per_row():
    x = torch.randn(4, 64, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(64, dtype=torch.bfloat16, requires_grad=True)
    kept = []

    def keep(tensor):
        kept.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        out = norm.rms_norm(x, [64], weight, 1e-5)
    assert out.dtype == torch.bfloat16
    assert sorted(kept, key=str) == [
        ((4, 1), torch.float32),
        ((4, 64), torch.bfloat16),
        ((64,), torch.bfloat16),
    ]
