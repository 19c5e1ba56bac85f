"""Where a cut dim goes when a tensor is reshaped, against torch itself."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.passes.placements import moved_by_transpose, reshaped_dim


@given(
    before=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    cuts=st.data(),
)
def test_a_kept_cut_means_the_same_elements(before, cuts):
    """Cutting, then reshaping locally equals reshaping, then cutting where the rule says."""
    count = 2
    dim = cuts.draw(st.integers(0, len(before) - 1))
    before[dim] *= count
    total = math.prod(before)
    after = _some_shape(total, cuts)
    moved = reshaped_dim(before, after, dim)
    if moved is None or after[moved] % count:
        return
    whole = torch.arange(total).view(before)
    local_shape = [size // count if d == moved else size for d, size in enumerate(after)]
    for index in range(count):
        local = whole.chunk(count, dim)[index].reshape(local_shape)
        assert torch.equal(local, whole.view(after).chunk(count, moved)[index])


def _some_shape(total, cuts):
    shape = []
    while total > 1:
        factor = cuts.draw(st.sampled_from([d for d in range(2, total + 1) if total % d == 0]))
        shape.append(factor)
        total //= factor
    return shape or [1]


def test_heads_keep_a_cut_of_the_features_and_the_other_way_round():
    assert reshaped_dim([3, 7, 64], [3, 7, 4, 16], 2) == 2
    assert reshaped_dim([3, 7, 4, 16], [3, 7, 64], 2) == 2


def test_flattening_tokens_loses_a_cut_of_the_sequence():
    assert reshaped_dim([3, 7, 64], [21, 64], 1) is None
    assert reshaped_dim([3, 7, 64], [21, 64], 2) == 1


def test_a_cut_of_the_width_of_heads_does_not_survive():
    assert reshaped_dim([3, 7, 4, 16], [3, 7, 64], 3) is None


def test_transposition_moves_only_its_two_dims():
    assert [moved_by_transpose(dim, 1, 2) for dim in range(4)] == [0, 2, 1, 3]
