"""What is done to weights without memory is what would have been done to them with memory."""

import pytest
import torch
from torch import nn

from runtime.any_module.recorder import recording
from runtime.capture.export import weights_on_meta


def number(value=0.5):
    return torch.tensor(value)


def scaled_in_place(fresh):
    fresh.fill_(3.0).mul_(number()).add_(number(2.0), alpha=4).div_(1 / number(8.0).sqrt())


def filled(fresh):
    fresh.normal_().fill_(number())


def copied(fresh):
    fresh.copy_(number())


def assigned(fresh):
    fresh[:] = number()


def changed_afterwards(fresh):
    factor = number()
    fresh.fill_(3.0).mul_(factor)
    factor.fill_(100.0)


def filled_with_a_double(fresh):
    fresh.fill_(1.0).mul_(torch.tensor(0.1, dtype=torch.float64))


@pytest.mark.parametrize(
    "change",
    [scaled_in_place, filled, copied, assigned, changed_afterwards, filled_with_a_double],
)
def test_tensors_without_dimensions_are_recorded_as_numbers(change):
    recorded, unknown = on_meta(change)
    eager = torch.empty(4, 3)
    change(eager)
    assert not unknown
    assert torch.equal(recorded, eager)


@pytest.mark.parametrize(
    "scale",
    [
        lambda fresh: fresh * number(),
        lambda fresh: number() * fresh,
        lambda fresh: fresh / number(),
        lambda fresh: number() + fresh,
        lambda fresh: torch.add(fresh, number(), alpha=3),
    ],
)
def test_copies_scaled_by_a_tensor_without_dimensions_follow_their_originals(scale):
    recorded, unknown = on_meta(lambda fresh: scale(fresh.fill_(3.0)))
    assert not unknown
    assert torch.equal(recorded, scale(torch.full((4, 3), 3.0)))


@pytest.mark.parametrize(
    "change",
    [
        lambda fresh: fresh.fill_(1.0).mul_(torch.arange(3)),
        lambda fresh: fresh[0].fill_(number()),
        lambda fresh: torch.sub(number(), fresh.fill_(1.0)),
        lambda fresh: torch.add(number(), fresh.fill_(1.0), alpha=3),
    ],
)
def test_what_no_piece_can_do_is_named(change):
    _, unknown = on_meta(change)
    assert unknown


def on_meta(change):
    """Return what is recorded of a change, done to zeros, and what of it is unknown."""
    with weights_on_meta(), recording() as recorder, torch.no_grad():
        fresh = nn.Parameter(torch.empty(4, 3))
        made = change(fresh)
    steps, unknown = recorder.memory(fresh if made is None else made)
    values = torch.zeros(4, 3)
    for step in steps:
        step.run(values, torch.Generator())
    return values, unknown
