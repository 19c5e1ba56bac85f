"""Counts of GPUs, and fronts of points that nothing beats in both."""

import pytest
from small_worlds import llama_8b, model

from costmodels.job import TrainingJob
from costmodels.profile_toml import read_profile
from planner.constraints import Constraints
from planner.search.pareto import non_dominated
from planner.search.sizing import counts_between, fewest_gpus

H100 = read_profile("h100-sxm-80gb")


def test_counts_double_up_to_a_node_and_by_nodes_above():
    assert counts_between(1, 64, 8) == (1, 2, 4, 8, 16, 32, 64)


def test_both_ends_of_a_range_are_tried():
    assert counts_between(24, 40, 8) == (24, 32, 40)


def test_counts_above_a_node_are_whole_nodes():
    assert counts_between(6, 20, 6) == (6, 12)


@pytest.mark.parametrize(("low", "high"), [(16, 8), (9, 15), (8, 2**18)])
def test_ranges_without_a_count_are_refused(low, high):
    with pytest.raises(ValueError, match=r"--gpus"):
        counts_between(low, high, 8)


def test_the_fewest_gpus_are_those_whose_memory_holds_the_states():
    """Adam keeps 16 to 18 bytes a parameter: 8 B parameters take two to four 80 GiB cards."""
    fixed = Constraints(micro_batch_size=(1,), offload=((),))
    job = TrainingJob(seq_len=1024, global_batch_size=16)
    fewest = fewest_gpus(llama_8b(), lambda _: job, H100, fixed)
    assert fewest in {2, 4}


def test_no_count_fits_where_one_layer_does_not():
    huge = model(hidden_size=28 * 8192, head_dim=8192, ffn_hidden_size=8 * 28 * 8192)
    job = TrainingJob(seq_len=1024, global_batch_size=1)
    fixed = Constraints(data_parallel=(1,), tensor_parallel=(1,), offload=((),))
    assert fewest_gpus(huge, lambda _: job, H100, fixed, high=8) is None


def test_points_that_another_beats_in_both_are_left_out():
    points = [(3, 1), (1, 3), (2, 2), (2, 3), (3, 2)]
    front = non_dominated(points, lambda p: p[0], lambda p: p[1])
    assert front == ((1, 3), (2, 2), (3, 1))


def test_of_equal_points_one_stays():
    assert non_dominated([(1, 1), (1, 1)], lambda p: p[0], lambda p: p[1]) == ((1, 1),)
