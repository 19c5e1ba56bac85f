"""What follows from short steps is what the whole step does, to the last byte."""

import lowering_models as small
import pytest

from costmodels.layout import Layout, Schedule
from costmodels.schedule import ActionKind, PipelineShape, shape_refusals
from runtime import dry_run as dry
from runtime.lower import actions_of, lower_graph
from runtime.short_steps import ShortStep, short_steps

RANKS = 6


def layout(schedule, *, ranks=RANKS, num_micro_batches=9, stages_per_rank=1, **changes):
    return Layout(
        pipeline_parallel=ranks,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        num_micro_batches=num_micro_batches,
        layers_per_stage=(1,) * ranks * stages_per_rank,
        **changes,
    )


def whole_step(plan, place):
    own = ShortStep(
        pipeline_parallel=plan.pipeline_parallel,
        place=place,
        num_micro_batches=plan.num_micro_batches,
    )
    return (own,)


def figures(run):
    return run.flops, run.num_bytes, run.peak


def assert_short_steps_say_what_the_whole_does(plan, places, monkeypatch):
    lowered = lower_graph(small.llama(num_layers=plan.num_stages), small.job(), plan)
    ranks = [place * plan.num_gpus // plan.pipeline_parallel for place in places]
    short = [dry.dry_run(lowered, small.job(), plan, rank) for rank in ranks]
    monkeypatch.setattr(dry, "short_steps", whole_step)
    for place, rank, found in zip(places, ranks, short, strict=True):
        assert len(short_steps(plan, place)) > 1
        whole = dry.dry_run(lowered, small.job(), plan, rank)
        assert figures(found) == figures(whole), place


@pytest.mark.parametrize("schedule", [Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE])
def test_every_rank_of_a_long_pipeline_follows_from_short_ones(schedule, monkeypatch):
    assert_short_steps_say_what_the_whole_does(layout(schedule), range(RANKS), monkeypatch)


@pytest.mark.parametrize("zero", [{"zero_stage": 2}, {"zero_stage": 3}, {"keep_gathered": True}])
def test_what_zero_moves_and_holds_follows_from_short_steps(zero, monkeypatch):
    changes = {"data_parallel": 2, "zero_group": 2, "zero_stage": 3, **zero}
    plan = layout(Schedule.ONE_F_ONE_B, ranks=4, num_micro_batches=7, **changes)
    assert_short_steps_say_what_the_whole_does(plan, (0, 3), monkeypatch)


SEVERAL_STAGES = [
    Schedule.INTERLEAVED,
    Schedule.ZERO_BUBBLE,
    Schedule.ZBV,
    Schedule.DUALPIPEV,
]


@pytest.mark.parametrize("schedule", SEVERAL_STAGES)
def test_with_several_stages_per_rank_whole_rounds_are_left_out(schedule, monkeypatch):
    plan = layout(schedule, ranks=2, num_micro_batches=8, stages_per_rank=2)
    assert [step.num_micro_batches for step in short_steps(plan, 0)] == [4, 6]
    assert_short_steps_say_what_the_whole_does(plan, range(2), monkeypatch)


@pytest.mark.parametrize("schedule", SEVERAL_STAGES)
def test_rows_of_two_rounds_hold_what_longer_ones_do(schedule):
    """Rounds are of 4 or more: 15 micro-batches on 4 ranks run in three rounds of 5."""
    shortened = 0
    for ranks, count in [(2, 7), (4, 13), (4, 15), (4, 16), (5, 23), (5, 24), (8, 36)]:
        sizes = {"pipeline_parallel": ranks, "stages_per_rank": 2, "num_micro_batches": count}
        if shape_refusals(PipelineShape(schedule=schedule, **sizes)):
            continue
        plan = layout(schedule, ranks=ranks, num_micro_batches=count, stages_per_rank=2)
        for place in range(ranks):
            steps = short_steps(plan, place)
            shortened += len(steps) > 1
            whole = most_held(actions_of(plan, place))
            assert all(most_held(step.actions(plan, place)) == whole for step in steps), sizes
    assert shortened


def most_held(row):
    """Return what is held at moments at which no other holds as much: counts by stage."""
    lets_go = {
        ActionKind.FORWARD: (),
        ActionKind.BACKWARD: ("input", "weight"),
        ActionKind.BACKWARD_INPUT: ("input",),
        ActionKind.BACKWARD_WEIGHT: ("weight",),
    }
    stages = sorted({action.stage for action in row})
    held = {(stage, what): 0 for stage in stages for what in ("input", "weight")}
    moments = set()
    for action in row:
        if action.is_compute:
            for what in ("input", "weight"):
                change = 1 if action.kind is ActionKind.FORWARD else 0
                held[action.stage, what] += change - (what in lets_go[action.kind])
            moments.add(tuple(held.values()))
    return {
        one
        for one in moments
        if not any(
            other != one and all(a <= b for a, b in zip(one, other, strict=True))
            for other in moments
        )
    }


def test_short_rows_stand_on_the_ranks_own_stage_and_keep_the_ends():
    plan = layout(Schedule.ONE_F_ONE_B, ranks=32, num_micro_batches=480)
    for place, kinds in ((0, {"SEND_F", "RECV_B"}), (31, {"RECV_F", "SEND_B"})):
        for step in short_steps(plan, place):
            row = step.actions(plan, place)
            assert {action.stage for action in row} == {place}
            assert {a.kind.value for a in row if not a.is_compute} == kinds
            assert len(row) < 40


def test_steps_that_never_become_steady_are_run_whole():
    plan = layout(Schedule.ONE_F_ONE_B, ranks=8, num_micro_batches=8)
    (step,) = short_steps(plan, 3)
    assert step.actions(plan, 3) == actions_of(plan, 3)
