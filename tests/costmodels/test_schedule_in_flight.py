import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.layout import Schedule
from costmodels.layout_table import SCHEDULES
from costmodels.schedule import (
    ActionKind,
    PipelineShape,
    build_schedule,
    held_moments,
    in_flight,
    in_flight_closed_form,
    shape_refusals,
)

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT  # noqa: E741


def admitted(*, ranks, stages, counts):
    for schedule in Schedule:
        for pp in ranks:
            for v in stages:
                for m in counts:
                    shape = PipelineShape(
                        schedule=schedule,
                        pipeline_parallel=pp,
                        stages_per_rank=v,
                        num_micro_batches=m,
                    )
                    if not shape_refusals(shape):
                        yield schedule, pp, v, m


def counted(table, rank):
    """Largest number of micro-batches held at once, by walking the row."""
    held = most = 0
    for action in table.actions(rank):
        held += (action.kind is F) - (action.kind in (B, W))
        most = max(most, held)
    return most


def test_every_small_shape_holds_what_its_table_says():
    for shape in admitted(ranks=range(1, 6), stages=range(1, 4), counts=range(1, 17)):
        table = build_schedule(*shape)
        expected = tuple(counted(table, rank) for rank in range(shape[1]))
        assert in_flight(*shape) == expected, shape


def test_long_steps_hold_what_their_whole_table_says():
    for shape in admitted(ranks=(2, 4, 7), stages=(1, 2, 3), counts=(53, 96, 112)):
        table = build_schedule(*shape)
        expected = tuple(counted(table, rank) for rank in range(shape[1]))
        assert in_flight(*shape) == expected, shape


def test_closed_forms_equal_the_tables():
    for schedule, pp, v, m in admitted(ranks=range(1, 7), stages=range(1, 5), counts=range(1, 31)):
        numbers = map(np.array, (SCHEDULES.index(schedule), pp, v, m))
        form = in_flight_closed_form(*numbers, np.arange(pp))
        assert tuple(form.tolist()) == in_flight(schedule, pp, v, m), (schedule, pp, v, m)


@pytest.mark.parametrize(
    ("schedule", "v", "expected"),
    [
        (Schedule.GPIPE, 1, (16, 16, 16, 16)),
        (Schedule.ONE_F_ONE_B, 1, (4, 3, 2, 1)),
        (Schedule.INTERLEAVED, 2, (11, 9, 7, 5)),  # half-stages; Megatron: 4 + 2 (3 - r) + 1
        (Schedule.ZERO_BUBBLE, 1, (4, 4, 4, 4)),  # ZB-H1: no rank above 1f1b's first
        (Schedule.ZBV, 2, (8, 8, 8, 8)),  # half-stages: the same memory as 1f1b's first rank
        (Schedule.DUALPIPEV, 2, (9, 9, 9, 9)),
    ],
)
def test_four_ranks_with_sixteen_micro_batches_hold_the_papers_counts(schedule, v, expected):
    assert in_flight(schedule, 4, v, 16) == expected


def test_zero_bubble_lets_the_inputs_part_go_earlier():
    first, *_, last = held_moments(Schedule.ZERO_BUBBLE, 4, 1, 16)
    assert first.until_input.max() == 4
    assert last.until_input.max() == 1  # like 1f1b's last rank
    assert last.until_weight.max() == 4  # three weight gradients are put off


@given(
    shape=st.sampled_from(list(admitted(ranks=(1, 2, 4), stages=(1, 2, 3), counts=(1, 4, 8, 70)))),
    data=st.data(),
)
@settings(deadline=None, max_examples=60)
def test_weighted_peak_is_the_most_that_a_walk_over_the_row_sees(shape, data):
    table = build_schedule(*shape)
    sizes = st.floats(0.0, 10.0)
    for rank, held in enumerate(held_moments(*shape)):
        count = len(held.stages)
        early = np.array(data.draw(st.lists(sizes, min_size=count, max_size=count)))
        late = np.array(data.draw(st.lists(sizes, min_size=count, max_size=count)))
        total = peak = 0.0
        for action in table.actions(rank):
            i = held.stages.index(action.stage)
            total += {F: early[i] + late[i], B: -early[i] - late[i], I: -early[i], W: -late[i]}[
                action.kind
            ]
            peak = max(peak, total)
        assert held.peak(early, late) == pytest.approx(peak, rel=1e-9, abs=1e-9)


def test_moments_name_the_ranks_stages_in_model_order():
    assert [held.stages for held in held_moments(Schedule.ZBV, 3, 2, 8)] == [(0, 5), (1, 4), (2, 3)]
    assert [held.stages for held in held_moments(Schedule.INTERLEAVED, 2, 3, 8)] == [
        (0, 2, 4),
        (1, 3, 5),
    ]


def test_a_refused_shape_has_no_moments():
    with pytest.raises(ValueError, match="dualpipev needs a micro-batch per stage"):
        held_moments(Schedule.DUALPIPEV, 4, 2, 3)
