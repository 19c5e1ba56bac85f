"""Long steps by repetition equal long steps simulated in full."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.layout import Schedule
from costmodels.schedule import (
    PipelineShape,
    StageDurations,
    build_schedule,
    shape_refusals,
    simulate,
    simulate_schedule,
    steady,
)

REPEATING = [s for s in Schedule if s is not Schedule.GPIPE]


def sizes(shape):
    return (
        shape.schedule,
        shape.pipeline_parallel,
        shape.stages_per_rank,
        shape.num_micro_batches,
    )


@st.composite
def long_steps(draw):
    shape = PipelineShape(
        schedule=draw(st.sampled_from(list(Schedule))),
        pipeline_parallel=draw(st.integers(1, 5)),
        stages_per_rank=draw(st.integers(1, 3)),
        num_micro_batches=draw(st.integers(30, 150)),
    )
    while refusals := shape_refusals(shape):
        shape = replace(shape, **{refusals[0].parameter: refusals[0].allowed[0]})
    # Equal stages, one slow stage, nearly equal ones (slow to settle), and no order at all.
    low, high = draw(st.sampled_from([(1.0, 1.0), (0.97, 1.03), (0.1, 3.0)]))
    seconds = st.floats(low, high)
    stages = shape.num_stages

    def column():
        values = draw(st.lists(seconds, min_size=stages, max_size=stages))
        values[-1] *= draw(st.sampled_from([1.0, 1.4]))
        return tuple(values)

    durations = StageDurations(forward=column(), backward_input=column(), backward_weight=column())
    return shape, durations, draw(st.sampled_from([0.0, 0.05, 0.7]))


@given(step=long_steps(), overlaps=st.booleans())
@settings(deadline=None, max_examples=150)
def test_repetition_gives_what_the_whole_table_gives(step, overlaps):
    shape, durations, transfer = step
    full = simulate(build_schedule(*sizes(shape)), durations, transfer, p2p_overlaps=overlaps)
    fast = simulate_schedule(*sizes(shape), durations, transfer, p2p_overlaps=overlaps)
    assert fast.makespan == pytest.approx(full.makespan, rel=1e-11)
    assert fast.busy == pytest.approx(full.busy, rel=1e-11)


@pytest.mark.parametrize("schedule", REPEATING)
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_every_schedule_but_gpipe_repeats_cleanly_after_it_has_filled(schedule, pp):
    v = 1 if schedule is Schedule.ONE_F_ONE_B else 2
    short = build_schedule(schedule, pp, v, 40 * pp).shape.shortened(6)
    assert short.num_micro_batches == 6 * pp
    assert steady._steady_windows(short) is not None


def test_a_settled_step_builds_no_long_table(monkeypatch):
    built = []
    original = steady.table_of_shape

    def spy(shape):
        built.append(shape.num_micro_batches)
        return original(shape)

    monkeypatch.setattr(steady, "table_of_shape", spy)
    ones = (1.0,) * 8
    durations = StageDurations(forward=ones, backward_input=ones, backward_weight=ones)
    result = simulate_schedule(Schedule.INTERLEAVED, 4, 2, 100_000, durations)
    assert result.makespan == pytest.approx(3 * (2 * 100_000 + 3), rel=1e-12)
    assert max(built) == 24


def test_a_step_that_does_not_settle_is_simulated_in_full(monkeypatch):
    monkeypatch.setattr(steady, "_spacing", lambda *_: None)
    ones = (1.0,) * 4
    durations = StageDurations(forward=ones, backward_input=ones, backward_weight=ones)
    result = simulate_schedule(Schedule.ONE_F_ONE_B, 4, 1, 200, durations)
    assert result == simulate(build_schedule(Schedule.ONE_F_ONE_B, 4, 1, 200), durations)


def test_windows_that_are_not_yet_evenly_spaced_are_not_extended():
    # Both ranks work 6 s per micro-batch, whatever the mix: windows follow each other by 6 s.
    shape = build_schedule(Schedule.ONE_F_ONE_B, 2, 1, 12).shape
    windows = steady._steady_windows(shape)
    table = build_schedule(Schedule.ONE_F_ONE_B, 2, 1, 12)
    uneven = StageDurations(
        forward=(1.0, 5.0), backward_input=(1.0, 0.5), backward_weight=(4.0, 0.5)
    )
    _, ends = steady.simulate_rows(table, uneven)
    assert steady._spacing(ends, windows) == pytest.approx(6.0)
    shifted = [row.copy() for row in ends]
    shifted[0][windows[0][0]] += 0.25
    assert steady._spacing(shifted, windows) is None


def test_a_refused_shape_is_refused_before_anything_is_built():
    ones = (1.0,) * 4
    durations = StageDurations(forward=ones, backward_input=ones, backward_weight=ones)
    with pytest.raises(ValueError, match="exactly 2"):
        simulate_schedule(Schedule.ZBV, 4, 1, 1000, durations)
