"""The tracker counts by hand what small operations do, on fake tensors as on real ones."""

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from runtime.dry_run.trackers import ALLOCATION_BLOCK, Tracker
from runtime.ops.grouped import grouped_linear
from runtime.states import buckets

MIB_OF_FLOATS = 2**18


def test_a_linear_layer_and_its_gradients_are_three_products():
    x = torch.randn(2, 3, 5, requires_grad=True)
    weight = torch.randn(7, 5, requires_grad=True)
    with Tracker().watching() as tracker:
        functional.linear(x, weight).sum().backward()
    assert tracker.flops == 3 * 2 * 6 * 5 * 7


@pytest.mark.parametrize("fake", [False, True])
def test_experts_count_the_products_of_their_own_rows(fake):
    with FakeTensorMode() if fake else nullcontext(), Tracker().watching() as tracker:
        x = torch.randn(6, 5, requires_grad=True)
        weights = torch.randn(3, 7, 5, requires_grad=True)
        grouped_linear(x, weights, (2, 0, 4)).sum().backward()
    assert tracker.flops == 3 * 2 * 6 * 5 * 7


@pytest.mark.parametrize(("causal", "share"), [(True, 2), (False, 1)])
def test_attention_counts_two_products_forward_and_five_backward(causal, share):
    q = torch.randn(1, 4, 16, 8, requires_grad=True)
    k, v = (torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(2))
    with Tracker().watching() as tracker:
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        out.sum().backward()
    assert tracker.flops == 7 * 2 * (4 * 16 * 16 * 8) // share


def test_a_storage_counts_once_and_until_it_is_gone():
    with Tracker().watching() as tracker:
        one = torch.empty(MIB_OF_FLOATS)
        view = one.view(2, -1)
        assert tracker.live == 2**20
        two = one + 1
        assert tracker.live == 2**21
        del one
        assert tracker.live == 2**21
        del view
        assert tracker.live == 2**20
        del two
    assert (tracker.live, tracker.peak) == (0, 2**21)


def test_small_tensors_take_a_whole_block():
    with Tracker().watching() as tracker:
        kept = torch.empty(1)
    assert kept.numel() == 1
    assert tracker.live == ALLOCATION_BLOCK


def test_a_resized_storage_counts_at_its_new_size():
    with Tracker().watching() as tracker:
        flat = torch.empty(MIB_OF_FLOATS)
        buckets.resize(flat, 0)
        assert tracker.live == 0
        buckets.resize(flat, 2**20)
        assert tracker.live == 2**20
    assert tracker.peak == 2**20


def block(seed=0):
    torch.manual_seed(seed)
    weights = [torch.randn(64, 64, requires_grad=True) for _ in range(3)]
    x = torch.randn(32, 64)
    for weight in weights:
        x = torch.tanh(x @ weight)
    x.sum().backward()
    return weights


def test_fake_tensors_have_the_peak_of_real_ones():
    peaks = []
    for mode in (FakeTensorMode, torch.enable_grad):
        with mode(), Tracker().watching() as tracker:
            block()
        peaks.append((tracker.peak, tracker.flops))
    assert peaks[0] == peaks[1]
    # Three products forward; backward two each, but the first layer's input needs no gradient.
    assert peaks[0][1] == (3 + 3 + 2) * 2 * 32 * 64 * 64
