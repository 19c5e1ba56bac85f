from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.layout import Schedule
from costmodels.schedule import (
    Action,
    ActionKind,
    PipelineShape,
    ScheduleTable,
    build_schedule,
    format_grid,
    parse_action,
    shape_refusals,
    table_from_strings,
    validate,
    with_communication,
)


@st.composite
def admitted_shapes(draw, max_ranks=6, max_micro_batches=24):
    shape = PipelineShape(
        schedule=draw(st.sampled_from(list(Schedule))),
        pipeline_parallel=draw(st.integers(1, max_ranks)),
        stages_per_rank=draw(st.integers(1, 3)),
        num_micro_batches=draw(st.integers(1, max_micro_batches)),
    )
    while refusals := shape_refusals(shape):
        fixed = {refusals[0].parameter: refusals[0].allowed[0]}
        sizes = {
            name: getattr(shape, name)
            for name in ("pipeline_parallel", "stages_per_rank", "num_micro_batches")
        }
        shape = PipelineShape(schedule=shape.schedule, **(sizes | fixed))
    return shape


def build(shape):
    return build_schedule(
        shape.schedule, shape.pipeline_parallel, shape.stages_per_rank, shape.num_micro_batches
    )


def rows(table):
    return [" ".join(row) for row in table.strings()]


def broken(rows_of_text, schedule=Schedule.ONE_F_ONE_B, v=1, m=2):
    """A table of the given strings, unchecked."""
    shape = PipelineShape(
        schedule=schedule,
        pipeline_parallel=len(rows_of_text),
        stages_per_rank=v,
        num_micro_batches=m,
    )
    return table_from_strings(shape, [row.split() for row in rows_of_text])


def test_1f1b_of_three_ranks_and_four_micro_batches_by_hand():
    assert rows(build_schedule(Schedule.ONE_F_ONE_B, 3, 1, 4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_1f1b_runs_fewer_micro_batches_than_ranks():
    assert rows(build_schedule(Schedule.ONE_F_ONE_B, 3, 1, 1)) == ["0F0 0B0", "1F0 1B0", "2F0 2B0"]


def test_1f1b_of_one_rank_is_plain_gradient_accumulation():
    assert rows(build_schedule(Schedule.ONE_F_ONE_B, 1, 1, 3)) == ["0F0 0B0 0F1 0B1 0F2 0B2"]


def test_gpipe_runs_all_forwards_first():
    assert rows(build_schedule(Schedule.GPIPE, 2, 1, 3)) == [
        "0F0 0F1 0F2 0B0 0B1 0B2",
        "1F0 1F1 1F2 1B0 1B1 1B2",
    ]


def test_zb_h1_puts_off_r_weight_gradients_on_rank_r():
    assert rows(build_schedule(Schedule.ZERO_BUBBLE, 3, 1, 4)) == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ]


def test_interleaving_turns_to_the_next_stage_after_a_round():
    # Megatron's order for pp 2, v 2: rank 0 holds stages 0 and 2, rounds of two micro-batches.
    first = rows(build_schedule(Schedule.INTERLEAVED, 2, 2, 4))[0]
    assert first == "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3"


@given(shape=admitted_shapes())
@settings(deadline=None)
def test_every_table_is_valid_and_so_is_its_communication(shape):
    validate(build(shape))
    validate(with_communication(build(shape)))


@given(shape=admitted_shapes())
@settings(deadline=None)
def test_every_value_that_crosses_ranks_is_sent_and_received_once(shape):
    counts = Counter(
        action.kind
        for rank in range(shape.pipeline_parallel)
        for action in with_communication(build(shape)).actions(rank)
    )
    ranks = shape.rank_of_stage
    crossings = sum(a != b for a, b in pairwise(ranks))
    for kind in ActionKind:
        if not kind.value.startswith(("SEND", "RECV")):
            continue
        assert counts[kind] == crossings * shape.num_micro_batches


@given(shape=admitted_shapes())
@settings(deadline=None)
def test_dropping_the_messages_gives_the_table_back(shape):
    full = with_communication(build(shape))
    compute = tuple(
        tuple(full.encode(a) for a in full.actions(rank) if a.is_compute)
        for rank in range(shape.pipeline_parallel)
    )
    assert ScheduleTable(shape=shape, rows=compute) == build(shape)


@given(shape=admitted_shapes(max_ranks=4, max_micro_batches=8))
@settings(deadline=None)
def test_strings_are_read_back_as_the_same_table(shape):
    for table in (build(shape), with_communication(build(shape))):
        assert table_from_strings(shape, table.strings()) == table


def test_messages_of_two_ranks_by_hand():
    assert rows(with_communication(build_schedule(Schedule.ONE_F_ONE_B, 2, 1, 2))) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]


def test_the_turn_of_a_v_sends_nothing():
    last = with_communication(build_schedule(Schedule.ZBV, 2, 2, 3)).strings()[1]
    assert not [text for text in last if text.startswith(("1SEND_F", "2RECV_F", "2SEND_B"))]
    assert [text for text in last if text.startswith("1SEND_B")] == [
        "1SEND_B0",
        "1SEND_B1",
        "1SEND_B2",
    ]


@pytest.mark.parametrize(
    "text", ["", "F0", "0X0", "0F", "-1F0", "0F0;1B0", "0F0 ", "(0F0;1B0)OVERLAP_F_B"]
)
def test_text_that_is_no_action_is_refused(text):
    if text.strip() == "0F0":
        assert parse_action(text) == Action(0, ActionKind.FORWARD, 0)
        return
    with pytest.raises(ValueError, match="is not an action"):
        parse_action(text)


def test_an_action_outside_the_shape_is_refused():
    with pytest.raises(ValueError, match="5F0 is outside the schedule: 2 stages, 2 micro-batches"):
        broken(["5F0", "1F0"])
    with pytest.raises(ValueError, match="3 rows for 2 pipeline ranks"):
        table_from_strings(build_schedule(Schedule.GPIPE, 2, 1, 1).shape, [[], [], []])


@pytest.mark.parametrize(
    ("table_rows", "message"),
    [
        (["0B0 0F0 0F1 0B1", "1F0 1B0 1F1 1B1"], "0B0 comes before its 0F0"),
        (["0F0 0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], "0F0 comes twice"),
        (["0F0 1F0 0F1 0B0 0B1", "1B0 1F1 1B1"], "1F0 belongs to rank 1, which holds stage 1"),
        (["0F0 0F1 0W0 0I0 0B1", "1F0 1B0 1F1 1B1"], "0W0 comes before its 0I0"),
        (["0F0 0F1 0B0", "1F0 1B0 1F1 1B1"], "must run micro-batch 1 .* the table holds F"),
        (["0F0 0F1 0B0 0B1 0I1 0W1", "1F0 1B0 1F1 1B1"], "the table holds F, B, I, W"),
        (["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"], r"deadlock: rank 0 waits in step 1 .* 0B0"),
    ],
)
def test_a_wrong_table_is_refused_with_its_fault(table_rows, message):
    with pytest.raises(ValueError, match=message):
        validate(broken(table_rows))


def test_the_grid_marks_the_step_that_is_wrong():
    with pytest.raises(ValueError, match="rank 1, step 1") as caught:
        validate(broken(["0F0 0F1 0B0 0B1", "1F0 1B1 1F1 1B0"]))
    assert str(caught.value).splitlines() == [
        "rank 1, step 1: 1B1 comes before its 1F1",
        "step  rank 0  rank 1",
        "0     0F0     1F0",
        "1     0F1     [1B1]   <-- here",
        "2     0B0     1F1",
        "3     0B1     1B0",
    ]


def test_a_long_grid_is_drawn_only_near_the_mark():
    drawn = format_grid(build_schedule(Schedule.GPIPE, 2, 1, 100), (0, 120)).splitlines()
    assert drawn[1].split()[0] == "114"
    assert drawn[-1].split()[0] == "126"


def test_a_message_without_its_other_end_is_refused():
    text = rows(with_communication(build_schedule(Schedule.ONE_F_ONE_B, 2, 1, 2)))
    with pytest.raises(ValueError, match="1F0 comes before its 1RECV_F0"):
        validate(broken([text[0], text[1].replace("1RECV_F0 ", "")]))
    with pytest.raises(ValueError, match="0SEND_F1 is missing"):
        validate(broken([text[0].replace("0SEND_F1 ", ""), text[1]]))
    with pytest.raises(ValueError, match="0SEND_F0 comes before its 0F0"):
        validate(broken([text[0].replace("0F0 0SEND_F0", "0SEND_F0 0F0"), text[1]]))


def test_crossed_blocking_messages_are_a_deadlock():
    # Both ranks send first: each waits for a receive that stands behind the other's send.
    crossed = broken(
        [
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
            "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
        ]
    )
    with pytest.raises(ValueError, match="deadlock: 0SEND_F1 waits for 1RECV_F1 on rank 1"):
        validate(crossed)
