"""What follows from short steps is what the whole step does, to the last byte."""

import lowering_models as small
import pytest

from costmodels.layout import Layout, Schedule
from runtime import dry_run as dry
from runtime.lower import actions_of, lower_graph
from runtime.short_steps import ShortStep, short_steps

RANKS = 7


def layout(schedule, *, ranks=RANKS, num_micro_batches=11, stages_per_rank=1):
    return Layout(
        pipeline_parallel=ranks,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        num_micro_batches=num_micro_batches,
        layers_per_stage=(1,) * ranks * stages_per_rank,
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


@pytest.mark.parametrize("schedule", [Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE])
def test_every_rank_of_a_long_pipeline_follows_from_short_ones(schedule, monkeypatch):
    plan = layout(schedule)
    lowered = lower_graph(small.llama(num_layers=RANKS), small.job(), plan)
    short = [dry.dry_run(lowered, small.job(), plan, rank) for rank in range(RANKS)]
    monkeypatch.setattr(dry, "short_steps", whole_step)
    for rank, found in enumerate(short):
        assert len(short_steps(plan, rank)) > 1
        whole = dry.dry_run(lowered, small.job(), plan, rank)
        assert figures(found) == figures(whole), rank


def test_with_several_stages_per_rank_whole_rounds_are_left_out(monkeypatch):
    plan = layout(Schedule.INTERLEAVED, ranks=2, num_micro_batches=10, stages_per_rank=2)
    lowered = lower_graph(small.llama(num_layers=4), small.job(), plan)
    assert [step.num_micro_batches for step in short_steps(plan, 0)] == [4, 6]
    short = [dry.dry_run(lowered, small.job(), plan, rank) for rank in range(2)]
    monkeypatch.setattr(dry, "short_steps", whole_step)
    for rank, found in enumerate(short):
        assert figures(found) == figures(dry.dry_run(lowered, small.job(), plan, rank))


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
