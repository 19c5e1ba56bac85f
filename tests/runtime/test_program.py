"""ParameterShard: pieces are cut and joined without loss."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.program import ParameterShard, with_positions
from runtime.states.first_values import move_buffers


@st.composite
def shards(draw):
    count = draw(st.integers(1, 4))
    segments = draw(st.integers(1, 3))
    per_piece = draw(st.integers(1, 3))
    size = count * segments * per_piece
    padding = draw(st.integers(0, count - 1)) if segments == 1 and per_piece > 1 else 0
    dim = draw(st.integers(0, 1))
    shape = [3, 3]
    shape[dim] = size - padding
    shard = ParameterShard(
        name="weight",
        global_shape=tuple(shape),
        dim=dim,
        axis="tp",
        num_segments=segments,
        padded_size=size,
    )
    return shard, count


@given(shards())
def test_joining_all_pieces_gives_the_parameter_back(case):
    shard, count = case
    full = torch.arange(9 * 12, dtype=torch.float32)[
        : shard.global_shape[0] * shard.global_shape[1]
    ]
    full = full.view(shard.global_shape)
    pieces = [shard.cut(full, index, count) for index in range(count)]
    assert {tuple(piece.shape) for piece in pieces} == {shard.local_shape(count)}
    assert torch.equal(shard.join(pieces), full)


def test_a_fused_projection_is_cut_segment_by_segment():
    shard = ParameterShard(
        name="c_attn", global_shape=(6,), dim=0, axis="tp", num_segments=3, padded_size=6
    )
    qkv = torch.tensor([10, 11, 20, 21, 30, 31])
    assert shard.cut(qkv, 0, 2).tolist() == [10, 20, 30]
    assert shard.cut(qkv, 1, 2).tolist() == [11, 21, 31]


def test_padding_rows_are_zero_and_leave_again():
    shard = ParameterShard(name="table", global_shape=(3, 2), dim=0, axis="tp", padded_size=4)
    full = torch.ones(3, 2)
    last = shard.cut(full, 1, 2)
    assert last.tolist() == [[1, 1], [0, 0]]
    assert shard.join([shard.cut(full, 0, 2), last]).shape == (3, 2)


def test_a_copy_is_the_same_on_every_rank():
    shard = ParameterShard(name="norm", global_shape=(4,))
    full = torch.randn(4)
    assert torch.equal(shard.cut(full, 1, 2), full)
    assert shard.local_shape(8) == (4,)


def test_a_parameter_of_another_shape_is_refused_with_both_shapes():
    shard = ParameterShard(name="norm", global_shape=(4,))
    with pytest.raises(ValueError, match=r"norm has shape \(5,\), the model expects \(4,\)"):
        shard.cut(torch.zeros(5), 0, 1)


def test_positions_count_from_zero_where_the_batch_has_none():
    ids = torch.zeros(2, 3, dtype=torch.long)
    assert with_positions({"input_ids": ids})["position_ids"].tolist() == [[0, 1, 2], [0, 1, 2]]
    given_positions = torch.tensor([[5, 6, 7]])
    batch = {"input_ids": ids[:1], "position_ids": given_positions}
    assert with_positions(batch)["position_ids"] is given_positions


def test_buffers_of_every_unit_move_and_parameters_stay():
    norm = torch.nn.BatchNorm1d(2)
    stage = torch.nn.Sequential(torch.nn.Linear(2, 2), norm)
    move_buffers(SimpleNamespace(stages=(stage,)), "meta")
    assert {name for name, _ in stage.named_buffers()} >= {"1.running_mean", "1.running_var"}
    assert all(buffer.is_meta for buffer in stage.buffers())
    assert not any(parameter.is_meta for parameter in stage.parameters())
