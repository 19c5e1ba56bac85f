"""Attention in parts: both kernels against softmax written out, and parts merged to the whole."""

import math

import pytest
import torch
from torch.nn import functional

from runtime.ops import partial_attention
from runtime.ops.partial_attention import Merged, Part, attend, differentiate

SCALE = 0.4


def operands(value_width=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    shapes = [(2, 8, 6, 4), (2, 4, 6, 4), (2, 4, 6, value_width), (2, 8, 6, value_width)]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def whole(q, k, v, gradient, *, is_causal):
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out = functional.scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, scale=SCALE, enable_gqa=True
    )
    out.backward(gradient)
    return out.detach(), q.grad, k.grad, v.grad


KERNELS = {
    "fused": (partial_attention.part_forward, partial_attention.part_backward),
    "plain": (partial_attention._plain_forward, partial_attention._plain_backward),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("value_width", [4, 3])
def test_kernels_return_output_statistic_and_gradients(kernel, is_causal, value_width):
    forward, backward = KERNELS[kernel]
    q, k, v, gradient = operands(value_width)
    expected = whole(q, k, v, gradient, is_causal=is_causal)
    out, lse = forward(q, k, v, is_causal, SCALE)
    torch.testing.assert_close(out, expected[0])
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) * SCALE
    if is_causal:
        hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    found = backward(gradient, q, k, v, out, lse, is_causal, SCALE)
    for got, want in zip(found, expected[1:], strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_keep_16_bit_tensors_and_a_32_bit_statistic(kernel):
    forward, backward = KERNELS[kernel]
    q, k, v, gradient = operands(dtype=torch.bfloat16)
    out, lse = forward(q, k, v, True, SCALE)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    found = backward(gradient, q, k, v, out, lse, True, SCALE)
    assert {x.dtype for x in found} == {torch.bfloat16}


PARTS = [
    Part(rows=slice(0, 6), columns=slice(0, 2), is_causal=False),
    Part(rows=slice(3, 6), columns=slice(2, 5), is_causal=False),
    Part(rows=slice(0, 6), columns=slice(5, 6), is_causal=False),
    Part(rows=slice(0, 3), columns=slice(2, 5), is_causal=False),
]


def test_parts_in_any_order_make_the_whole():
    q, k, v, gradient = operands()
    expected = whole(q, k, v, gradient, is_causal=False)
    for parts in (PARTS, PARTS[::-1]):
        merged = Merged(q, v.shape[-1])
        attend(merged, q, k, v, parts, SCALE)
        torch.testing.assert_close(merged.out, expected[0])
        gradients = tuple(torch.zeros_like(x) for x in (q, k, v))
        differentiate(gradients, gradient, (q, merged.out, merged.lse), (k, v), parts, SCALE)
        for got, want in zip(gradients, expected[1:], strict=True):
            torch.testing.assert_close(got, want)


def test_large_scores_do_not_overflow_when_parts_merge():
    q, k, v, gradient = operands()
    q = q * 400
    expected = whole(q, k, v, gradient, is_causal=False)
    merged = Merged(q, v.shape[-1])
    attend(merged, q, k, v, PARTS, SCALE)
    torch.testing.assert_close(merged.out, expected[0])


def test_pairs_are_counted_as_kernels_count_them():
    assert PARTS[0].num_pairs == 12
    assert Part(rows=slice(2, 6), columns=slice(0, 4), is_causal=True).num_pairs == 8
