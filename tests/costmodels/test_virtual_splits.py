"""Splits of several stages per rank: what the last stage gives, and who gets it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from small_worlds import llama_8b

from costmodels.layout import Layout, Schedule, split_layers
from costmodels.layout_table import table_of
from costmodels.virtual_splits import VirtualSplit, head_in_layers, virtual_splits


def split(num_layers, ranks, stages, given, *, is_v_shaped=False):
    return VirtualSplit(ranks, stages, given, is_v_shaped).of_layers(num_layers)


def test_the_last_stage_gives_to_the_rank_with_the_fewest_layers():
    assert split(32, 4, 2, 0) == (4, 4, 4, 4, 4, 4, 4, 4)
    assert split(32, 4, 2, 1) == (4, 4, 4, 4, 4, 4, 5, 3)  # rank 2, behind it lies the giver
    assert split(32, 4, 2, 2) == (4, 4, 4, 4, 4, 5, 5, 2)
    assert split(32, 4, 2, 3) == (4, 4, 4, 4, 5, 5, 5, 1)
    assert split(61, 8, 2, 1)[0] == 3  # the first stage stays short: the embedding is there
    assert split(10, 2, 2, 1) == (2, 3, 4, 1)


def test_in_a_v_both_ends_are_of_the_first_rank():
    assert split(32, 4, 2, 1, is_v_shaped=True) == (4, 4, 4, 4, 5, 4, 4, 3)
    assert split(12, 2, 2, 2, is_v_shaped=True) == (3, 4, 4, 1)


@given(
    ranks=st.integers(2, 9),
    stages=st.integers(2, 5),
    num_layers=st.integers(4, 200),
    given=st.integers(0, 3),
)
@pytest.mark.parametrize("is_v_shaped", [False, True])
def test_no_layer_is_lost_and_no_stage_empty(ranks, stages, num_layers, given, is_v_shaped):
    stages = 2 if is_v_shaped else stages
    assume(num_layers // (ranks * stages) > given)
    sizes = split(num_layers, ranks, stages, given, is_v_shaped=is_v_shaped)
    even = split_layers(num_layers, ranks * stages)
    assert sum(sizes) == num_layers
    assert sizes[-1] == even[-1] - given >= 1
    assert all(size >= before for size, before in zip(sizes[:-1], even[:-1], strict=True))


@pytest.mark.parametrize("schedule", [Schedule.INTERLEAVED, Schedule.ZBV])
def test_rows_name_their_splits(schedule):
    layout = Layout(
        pipeline_parallel=4,
        stages_per_rank=2,
        schedule=schedule,
        layers_per_stage=split_layers(32, 8),
        num_micro_batches=8,
    )
    whole = replace(layout, pipeline_parallel=1, stages_per_rank=1, layers_per_stage=(32,))
    table = replace(table_of([layout, whole, layout]), lighter_last=np.array([1, 0, 0]))
    splits, of_row = virtual_splits(table)
    assert [splits[number].lighter_last for number in of_row] == [1, 0, 0]
    assert splits[of_row[1]].of_layers(32) == (32,)
    ranks = tuple(map(layout.rank_of_stage, range(8)))
    assert {splits[number].rank_of_stage for number in of_row[[0, 2]]} == {ranks}


def test_the_head_of_llama_8b_weighs_as_much_as_two_layers_and_a_half():
    """128,256 x 4,096 over 4,096 x (2 x 4,096 + 2 x 1,024 + 3 x 14,336)."""
    assert head_in_layers(llama_8b()) == pytest.approx(128256 / (2 * 4096 + 2 * 1024 + 3 * 14336))
