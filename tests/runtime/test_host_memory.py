"""Activations in host memory: the same gradients, weights stay, small tensors stay."""

import pytest
import torch
from torch import nn

from runtime.states.host_memory import activations_on_host


def build():
    torch.manual_seed(3)
    layers = [nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4), nn.Sigmoid()]
    return nn.Sequential(*layers).double(), torch.randn(8, 16, dtype=torch.float64)


def gradients(model, x, context=None):
    model.zero_grad()
    if context is None:
        model(x).sum().backward()
    else:
        with context:
            total = model(x).sum()
        total.backward()
    return [p.grad.clone() for p in model.parameters()]


def test_gradients_are_the_same_when_everything_moves():
    model, x = build()
    moved = []
    context = activations_on_host(
        model.parameters(), least_bytes=0, moves=lambda t: moved.append(t.numel()) or True
    )
    for got, expected in zip(gradients(model, x, context), gradients(model, x), strict=True):
        assert torch.equal(got, expected)
    # Sigmoid's output, and tanh's twice: the linear layer behind it saves it too.
    assert sorted(moved) == [8 * 4, 8 * 16, 8 * 16, 8 * 16]


def test_weights_and_their_views_stay():
    model, x = build()
    seen = set()
    context = activations_on_host(
        model.parameters(), least_bytes=0, moves=lambda t: seen.add(t.data_ptr()) or False
    )
    gradients(model, x, context)
    assert seen
    assert not seen & {p.data_ptr() for p in model.parameters()}


@pytest.mark.parametrize(("least_bytes", "count"), [(8 * 16 * 8, 3), (8 * 16 * 8 + 1, 0)])
def test_small_tensors_stay(least_bytes, count):
    model, x = build()
    moved = []
    context = activations_on_host(
        model.parameters(), least_bytes=least_bytes, moves=lambda t: moved.append(t) or True
    )
    gradients(model, x, context)
    assert len(moved) == count


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_saved_activations_leave_the_gpu_between_forward_and_backward():
    model, x = build()
    model, x = model.cuda(), x.cuda().repeat(4096, 1)
    expected = gradients(model, x)
    moved = gradients(model, x, activations_on_host(model.parameters()))
    for got, whole in zip(moved, expected, strict=True):
        assert torch.allclose(got, whole)
