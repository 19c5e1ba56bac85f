"""Counts of GPUs, and fronts of points that nothing beats in both."""

import pytest
from small_worlds import llama_8b, model

from costmodels.hardware import make_cluster
from costmodels.job import TrainingJob
from costmodels.layout import Recompute, split_layers
from costmodels.profiles.reader import read_profile
from planner.constraints import Constraints
from planner.judge import SAFE_FRACTION
from planner.search.fewest import _doubling, fewest_gpus, first_fit
from planner.search.pareto import non_dominated
from planner.search.ranking import search
from planner.search.sizing import counts_around, counts_between, sweep

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


@pytest.mark.parametrize(
    ("low", "node", "counts"),
    [
        (1, 8, [1, 2, 4, 8, 16, 32, 64, 96]),
        (5, 8, [5, 8, 16, 32, 64, 96]),
        (9, 8, [16, 32, 64, 96]),
        (1, 6, [1, 2, 6, 12, 24, 48, 96]),
        (104, 8, []),
    ],
)
def test_counts_grow_by_whole_nodes_from_any_start(low, node, counts):
    assert [*_doubling(low, 100, node)] == counts


def test_the_fewest_gpus_are_those_whose_memory_holds_the_states():
    """Adam keeps 16 to 18 bytes a parameter: 8 B take 120 to 135 GiB, two cards of 73 GiB."""
    fixed = Constraints(micro_batch_size=(1,), offload=((),))
    job = TrainingJob(seq_len=1024, global_batch_size=16)
    fewest = fewest_gpus(llama_8b(), lambda _: job, H100, fixed, share=SAFE_FRACTION, node=8)
    assert fewest is not None
    assert fewest.num_gpus == 2
    assert fewest.layout.num_gpus == fewest.num_gpus


def test_no_count_fits_where_one_layer_does_not():
    huge = model(hidden_size=28 * 8192, head_dim=8192, ffn_hidden_size=8 * 28 * 8192)
    job = TrainingJob(seq_len=1024, global_batch_size=1)
    fixed = Constraints(data_parallel=(1,), tensor_parallel=(1,), offload=((),))
    assert (
        fewest_gpus(huge, lambda _: job, H100, fixed, share=SAFE_FRACTION, node=8, high=8) is None
    )


def test_points_that_another_beats_in_both_are_left_out():
    points = [(3, 1), (1, 3), (2, 2), (2, 3), (3, 2)]
    front = non_dominated(points, lambda p: p[0], lambda p: p[1])
    assert front == ((1, 3), (2, 2), (3, 1))


def test_of_equal_points_one_stays():
    assert non_dominated([(1, 1), (1, 1)], lambda p: p[0], lambda p: p[1]) == ((1, 1),)


# 40 layers of the 8B model have 10 B parameters, 18 bytes each without ZeRO: 3 GPUs of 73 GiB.
ODD = Constraints(zero_stage=(0,), recompute=(Recompute.FULL,), offload=((),))
ODD_JOB = TrainingJob(seq_len=1024, global_batch_size=24)


def test_more_gpus_are_the_fewest_nodes_that_fit():
    """Every smaller number of nodes was tried by hand, and fits nothing."""
    model, node = llama_8b(num_layers=40), 1
    miss = search(model, ODD_JOB, make_cluster(H100, 1, node), ODD).nearest_miss
    assert miss is not None
    (more,) = [one for one in miss.relaxations if one.change.startswith("more GPUs")]
    fits = {
        count: first_fit(model, ODD_JOB, make_cluster(H100, count, node), ODD, SAFE_FRACTION)
        is not None
        for count in range(2, more.gpus + 1)
    }
    assert fits == dict.fromkeys(range(2, more.gpus), False) | {more.gpus: True}
    assert more.gpus & (more.gpus - 1)  # no power of two: doubling alone would have missed it


def test_the_nearest_miss_is_not_crowded_out_by_lighter_last_stages():
    """They have lower bounds than the even split, and hold more on the ranks that take layers."""
    heavy_head = llama_8b(num_layers=24, vocab_size=256000)
    fixed = Constraints(stages_per_rank=(2,), recompute=(Recompute.NONE,), offload=((),))
    small = make_cluster(read_profile("h100-sxm-80gb", ("device.memory_gib=4",)), 8, 8)
    miss = search(heavy_head, TrainingJob(seq_len=8192, global_batch_size=64), small, fixed)
    assert miss.nearest_miss is not None
    layout = miss.nearest_miss.judgement.layout
    assert layout.layers_per_stage == split_layers(24, layout.num_stages)


def test_any_number_of_workers_gives_the_same_answers():
    arguments = (llama_8b(num_layers=8), lambda _: ODD_JOB, H100, ODD)
    one, two = (sweep(*arguments, counts=(2, 3, 4), node=1, workers=workers) for workers in (1, 2))
    assert one == two
    fewest = [fewest_gpus(*arguments, share=SAFE_FRACTION, node=1, workers=n) for n in (1, 2)]
    assert fewest[0] == fewest[1]


def test_counts_around_another_are_whole_nodes():
    assert counts_around(8, 8) == (4, 16, 32)
    assert counts_around(24, 8) == (48, 96)
    assert counts_around(1, 8) == (2, 4)
