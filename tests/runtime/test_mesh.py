"""The grid: coordinates, groups that follow from them, and worlds that refuse a wrong size."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.layout import AXES, Layout
from runtime.communication import collectives
from runtime.communication.grid import GROUP_AXES, coordinates, members, rank_at
from runtime.launch import RankFailedError, run_ranks


@st.composite
def layouts(draw):
    dp, tp, pp, cp = (draw(st.sampled_from([1, 2, 3, 4])) for _ in range(4))
    stage = dp * tp * cp
    divisors = [n for n in range(1, stage + 1) if stage % n == 0]
    ep = draw(st.sampled_from(divisors))
    etp = draw(st.sampled_from([n for n in divisors if stage % (ep * n) == 0]))
    zero_groups = [  # the rule `zero_group_divides_by_experts` refuses the others
        n
        for n in range(1, dp * cp + 1)
        if dp * cp % n == 0 and (n * tp % (ep * etp) == 0 or ep * etp % (n * tp) == 0)
    ]
    return Layout(
        data_parallel=dp,
        tensor_parallel=tp,
        pipeline_parallel=pp,
        context_parallel=cp,
        expert_parallel=ep,
        expert_tensor_parallel=etp,
        zero_group=draw(st.sampled_from(zero_groups)),
        layers_per_stage=(1,) * pp,
        rank_order=tuple(draw(st.permutations(AXES))),
    )


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_groups_of_every_axis_partition_the_world_into_equal_parts(layout):
    for axis in GROUP_AXES:
        groups = {members(layout, rank, axis) for rank in range(layout.num_gpus)}
        covered = sorted(rank for group in groups for rank in group)
        assert covered == list(range(layout.num_gpus)), axis
        for rank in range(layout.num_gpus):
            assert rank in members(layout, rank, axis)
        if axis != "ends":
            assert len({len(group) for group in groups}) == 1, axis


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_sizes_of_groups_are_the_degrees(layout):
    sizes = {axis: len(members(layout, 0, axis)) for axis in GROUP_AXES}
    stage = layout.data_parallel * layout.context_parallel * layout.tensor_parallel
    assert sizes["tp"] == layout.tensor_parallel
    assert sizes["pp"] == layout.pipeline_parallel
    assert sizes["dp_cp"] == layout.data_parallel * layout.context_parallel
    assert sizes["zero"] == layout.zero_group
    assert sizes["zero"] * sizes["zero_replicas"] == sizes["dp_cp"]
    assert sizes["ep"] == layout.expert_parallel
    assert sizes["etp"] == layout.expert_tensor_parallel
    assert sizes["ep"] * sizes["etp"] * sizes["edp"] == stage


@given(layouts(), st.integers(min_value=0))
@settings(max_examples=60, deadline=None)
def test_rank_at_inverts_coordinates(layout, rank):
    rank %= layout.num_gpus
    assert rank_at(layout, coordinates(layout, rank)) == rank


def test_tensor_axis_is_innermost_and_pipeline_outermost_by_default():
    layout = Layout(
        data_parallel=2,
        tensor_parallel=2,
        pipeline_parallel=2,
        zero_group=2,
        layers_per_stage=(4, 4),
    )
    assert members(layout, 5, "tp") == (4, 5)
    assert members(layout, 5, "dp_cp") == (5, 7)
    assert members(layout, 5, "pp") == (1, 5)


def test_hsdp_cuts_states_over_neighbours_and_copies_them_across_groups():
    layout = Layout(data_parallel=8, zero_stage=3, zero_group=4, layers_per_stage=(4,))
    assert members(layout, 6, "zero") == (4, 5, 6, 7)
    assert members(layout, 6, "zero_replicas") == (2, 6)


def test_ends_join_first_and_last_stage_and_leave_the_middle_alone():
    layout = Layout(pipeline_parallel=4, data_parallel=2, layers_per_stage=(1,) * 4)
    assert members(layout, 1, "ends") == (1, 7)
    assert members(layout, 7, "ends") == (1, 7)
    assert members(layout, 3, "ends") == (3,)


def test_experts_fold_over_the_whole_stage_with_expert_tensor_innermost():
    layout = Layout(
        data_parallel=2,
        tensor_parallel=2,
        context_parallel=2,
        expert_parallel=2,
        expert_tensor_parallel=2,
        zero_group=4,
        layers_per_stage=(4,),
    )
    assert members(layout, 5, "etp") == (4, 5)
    assert members(layout, 5, "ep") == (5, 7)
    assert members(layout, 5, "edp") == (1, 5)


def test_axes_that_span_the_same_ranks_share_one_communicator():
    def work(world):
        mesh = world.mesh(Layout(data_parallel=2, zero_group=2, layers_per_stage=(4,)))
        handles = [mesh.group(axis).handle for axis in ("dp", "dp_cp", "zero", "world")]
        again = world.mesh(Layout(tensor_parallel=2, layers_per_stage=(4,)))
        return [
            all(handle is handles[0] for handle in handles),
            again.group("tp").handle is handles[0],
            mesh.group("tp").backend,
            copy.deepcopy(mesh) is mesh,
        ]

    assert run_ranks(work, 2) == [[True, True, "none", True]] * 2


def test_a_layout_that_does_not_fill_the_world_is_refused_with_both_numbers():
    def work(world):
        world.mesh(Layout(data_parallel=4, layers_per_stage=(4,)))

    with pytest.raises(RankFailedError, match=r"fills 4 ranks .* but this job has 2"):
        run_ranks(work, 2)


def test_ends_of_a_pipeline_do_not_put_later_groups_out_of_step():
    """Ranks 0 and 7 are in one group more than the others when the second layout asks."""

    def work(world):
        pipeline = Layout(pipeline_parallel=8, layers_per_stage=(1,) * 8)
        mixed = Layout(data_parallel=4, pipeline_parallel=2, zero_group=2, layers_per_stage=(4, 4))
        world.mesh(pipeline)
        mesh = world.mesh(mixed)
        return [
            int(collectives.all_reduce(torch.tensor(world.rank), mesh.group(axis)))
            for axis in ("dp", "zero", "pp")
        ]

    results = run_ranks(work, 8, timeout=60)
    assert results[0] == [0 + 1 + 2 + 3, 0 + 1, 0 + 4]
    assert results[7] == [4 + 5 + 6 + 7, 6 + 7, 3 + 7]
