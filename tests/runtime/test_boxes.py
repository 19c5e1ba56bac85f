"""Flat pieces as blocks: together they are the whole, each element once."""

from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.checkpoints.boxes import boxes, ranges
from runtime.program import ParameterShard

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@given(SHAPES, st.data())
@settings(max_examples=200, deadline=None)
def test_ranges_cover_a_flat_range_exactly_with_few_blocks(shape, data):
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(start, prod(shape)))
    covered = torch.zeros(shape, dtype=torch.int64)
    blocks = list(ranges(shape, start, stop))
    for block in blocks:
        covered[tuple(slice(low, high) for low, high in block)] += 1
    expected = torch.zeros(prod(shape), dtype=torch.int64)
    expected[start:stop] = 1
    assert torch.equal(covered.view(-1), expected)
    assert len(blocks) <= 2 * len(shape) - 1


def test_a_piece_that_begins_and_ends_inside_rows_has_three_blocks():
    assert list(ranges((4, 5), 3, 17)) == [((0, 1), (3, 5)), ((1, 3), (0, 5)), ((3, 4), (0, 2))]


@st.composite
def shards(draw):
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    dim = draw(st.integers(0, len(shape) - 1))
    count = draw(st.sampled_from([1, 2, 3]))
    segments = draw(st.sampled_from([1, 3]))
    if segments > 1:  # fused projections are never padded
        shape = (*shape[:dim], shape[dim] * segments * count, *shape[dim + 1 :])
        padded = shape[dim]
    else:
        padded = shape[dim] + -shape[dim] % count
    shard = ParameterShard(
        name="w", global_shape=shape, dim=dim, axis="tp", num_segments=segments, padded_size=padded
    )
    return shard, count


@given(shards(), st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_blocks_of_all_ranks_make_the_whole_parameter(case, ways):
    """Tensor parallelism cuts the parameter, then `ways` ranks share each local tensor flat."""
    shard, count = case
    whole = torch.arange(1, prod(shard.global_shape) + 1).view(shard.global_shape)
    rebuilt = torch.zeros_like(whole)
    for index in range(count):
        local = shard.cut(whole, index, count).reshape(-1)
        size = -(-len(local) // ways)
        for start in range(0, len(local), size):
            for box in boxes(shard, index, count, start, local[start : start + size]):
                place = tuple(
                    slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True)
                )
                assert torch.count_nonzero(rebuilt[place]) == 0
                rebuilt[place] = box.values
    assert torch.equal(rebuilt, whole)


def test_values_are_views_so_that_loading_fills_the_piece():
    shard = ParameterShard(name="w", global_shape=(3, 4))
    piece = torch.zeros(7)
    for box in boxes(shard, 0, 1, 2, piece):
        box.values.fill_(1.0)
    assert piece.sum() == 7
