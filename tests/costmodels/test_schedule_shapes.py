import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.layout import Layout, Schedule
from costmodels.layout_table import SCHEDULES
from costmodels.schedule import PipelineShape, build_schedule, shape_masks, shape_refusals


def shape(schedule, pp, v, m):
    return PipelineShape(
        schedule=schedule, pipeline_parallel=pp, stages_per_rank=v, num_micro_batches=m
    )


def rules(*arguments):
    return [refusal.rule for refusal in shape_refusals(shape(*arguments))]


@pytest.mark.parametrize("schedule", [Schedule.GPIPE, Schedule.ONE_F_ONE_B])
def test_gpipe_and_1f1b_take_one_stage_per_rank_and_any_number_of_micro_batches(schedule):
    for pp in (1, 4, 7):
        for m in (1, 2, 3, 50):
            assert rules(schedule, pp, 1, m) == []
    assert rules(schedule, 4, 2, 8) == ["stages_per_rank_of_schedule"]


def test_interleaving_needs_two_stages_on_each_of_two_ranks():
    assert rules(Schedule.INTERLEAVED, 4, 1, 8) == ["stages_per_rank_of_schedule"]
    assert rules(Schedule.INTERLEAVED, 1, 2, 8) == ["pipeline_of_schedule"]
    assert rules(Schedule.INTERLEAVED, 2, 2, 8) == []


def test_rounds_admit_10_micro_batches_on_4_ranks_but_not_9():
    # 10 // 4 = 2 rounds of 5; 9 // 4 = 2 rounds do not divide 9
    assert rules(Schedule.INTERLEAVED, 4, 2, 10) == []
    (refusal,) = shape_refusals(shape(Schedule.INTERLEAVED, 4, 2, 9))
    assert refusal.rule == "micro_batches_fill_rounds"
    assert (refusal.parameter, refusal.given) == ("num_micro_batches", 9)
    assert refusal.allowed == (8, 10)
    assert "9 micro-batches on 4 pipeline ranks" in refusal.message
    assert refusal.message.endswith("nearest: 8, 10")


def test_rounds_mean_nothing_with_one_stage_per_rank():
    assert rules(Schedule.ZERO_BUBBLE, 4, 1, 9) == []
    assert rules(Schedule.ZERO_BUBBLE, 4, 2, 9) == ["micro_batches_fill_rounds"]


def test_dualpipev_needs_a_micro_batch_per_stage_and_zbv_does_not():
    assert rules(Schedule.DUALPIPEV, 4, 2, 7) == ["micro_batches_fill_pipeline"]
    assert rules(Schedule.DUALPIPEV, 4, 2, 8) == []
    assert rules(Schedule.ZBV, 4, 2, 1) == []
    assert rules(Schedule.ZBV, 4, 3, 8) == ["stages_per_rank_of_schedule"]


@given(
    schedule=st.sampled_from(list(Schedule)),
    pp=st.integers(1, 12),
    v=st.integers(1, 4),
    m=st.integers(1, 60),
)
def test_every_allowed_value_that_a_refusal_names_mends_its_rule(schedule, pp, v, m):
    sizes = {"pipeline_parallel": pp, "stages_per_rank": v, "num_micro_batches": m}
    for refusal in shape_refusals(shape(schedule, pp, v, m)):
        assert refusal.given == sizes[refusal.parameter]
        for value in refusal.allowed:
            mended = PipelineShape(schedule=schedule, **(sizes | {refusal.parameter: value}))
            assert refusal.rule not in [r.rule for r in shape_refusals(mended)]


def test_masks_over_arrays_say_what_the_single_shape_says():
    grid = np.meshgrid(
        np.arange(len(SCHEDULES)), np.arange(1, 6), np.arange(1, 4), np.arange(1, 14)
    )
    columns = [axis.ravel() for axis in grid]
    masks = shape_masks(*columns)
    for row, (code, pp, v, m) in enumerate(zip(*map(np.ndarray.tolist, columns), strict=True)):
        broken = [rule for rule, holds in masks.items() if not holds[row]]
        assert broken == rules(SCHEDULES[code], pp, v, m)


def test_a_refused_shape_is_not_built():
    with pytest.raises(ValueError, match=r"zbv needs exactly 2 stage\(s\) per rank, not 1"):
        build_schedule(Schedule.ZBV, 4, 1, 8)
    with pytest.raises(ValueError, match="num_micro_batches must be at least 1, not 0"):
        build_schedule(Schedule.GPIPE, 4, 1, 0)


@pytest.mark.parametrize("schedule", list(Schedule))
def test_stages_lie_where_the_layout_puts_them(schedule):
    v = 1 if schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B) else 2
    layout = Layout(
        pipeline_parallel=4, stages_per_rank=v, schedule=schedule, layers_per_stage=(1,) * (4 * v)
    )
    expected = tuple(layout.rank_of_stage(s) for s in range(4 * v))
    assert shape(schedule, 4, v, 8).rank_of_stage == expected
