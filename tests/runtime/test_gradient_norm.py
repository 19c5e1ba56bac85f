"""The sum of squares behind the gradient's norm keeps its digits however many numbers there are."""

import pytest
import torch

from runtime.states.zero import NORM_ROW, sum_of_squares


@pytest.mark.parametrize("size", [0, 3, NORM_ROW, NORM_ROW + 1, 60 * NORM_ROW + 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_of_squares_equals_that_in_float64(size, dtype):
    generator = torch.Generator().manual_seed(1)
    values = torch.rand(size, generator=generator).pow(8).to(dtype)
    expected = values.double().square().sum().item()
    found = sum_of_squares(values, torch.float32)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_cutting_a_tensor_does_not_change_the_sum():
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(40 * NORM_ROW, generator=generator)
    whole = sum_of_squares(values, torch.float32)
    parts = sum(sum_of_squares(part, torch.float32) for part in values.chunk(3))
    assert parts.item() == pytest.approx(whole.item(), rel=1e-6)
