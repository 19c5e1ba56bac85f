"""What follows from a short row is what the whole row does, to the last byte."""

import lowering_models as small
import pytest

from costmodels.layout import Layout, Offload, Recompute, Schedule
from costmodels.schedule import Action, ActionKind, PipelineShape, shape_refusals
from runtime import dry_run as dry
from runtime.lower import lower_graph, rows_of
from runtime.short_rows import Figures, RowReader, added


def layout(schedule, *, ranks=4, num_micro_batches=9, stages_per_rank=1, **changes):
    return Layout(
        pipeline_parallel=ranks,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        num_micro_batches=num_micro_batches,
        layers_per_stage=(1,) * ranks * stages_per_rank,
        **changes,
    )


def figures(run):
    transfers = sorted((m.operation, m.peer, m.tag, m.num_bytes) for m in run.messages if m.tag)
    return run.flops, run.num_bytes, run.peak, transfers


def assert_short_rows_say_what_whole_ones_do(plan, places, monkeypatch, model=None):
    model = model or small.llama(num_layers=plan.num_stages)
    lowered = lower_graph(model, small.job(), plan)
    ranks = [place * plan.num_gpus // plan.pipeline_parallel for place in places]
    rows_run = []
    whole_step = dry._whole_step

    def noted(program, row, parts):
        rows_run.append(len({action.micro_batch for action in row}))
        return whole_step(program, row, parts)

    monkeypatch.setattr(dry, "_whole_step", noted)
    short = [dry.dry_run(lowered, small.job(), plan, rank) for rank in ranks]
    assert len(rows_run) == len(ranks), "a situation did two things, and whole rows were run"
    assert max(rows_run) < plan.num_micro_batches
    monkeypatch.setattr(dry, "_short_row", lambda _, row: row)
    for place, rank, found in zip(places, ranks, short, strict=True):
        whole = dry.dry_run(lowered, small.job(), plan, rank)
        assert figures(found) == figures(whole), place


SCHEDULES = [
    (Schedule.GPIPE, 1),
    (Schedule.ONE_F_ONE_B, 1),
    (Schedule.ZERO_BUBBLE, 1),
    (Schedule.ZERO_BUBBLE, 2),
    (Schedule.INTERLEAVED, 2),
    (Schedule.ZBV, 2),
    (Schedule.DUALPIPEV, 2),
]


@pytest.mark.parametrize(("schedule", "stages_per_rank"), SCHEDULES)
def test_every_rank_of_a_long_row_follows_from_a_short_one(schedule, stages_per_rank, monkeypatch):
    plan = layout(schedule, ranks=3, num_micro_batches=12, stages_per_rank=stages_per_rank)
    assert_short_rows_say_what_whole_ones_do(plan, range(3), monkeypatch)


STATES = {
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
    "kept": {"zero_stage": 3, "keep_gathered": True},
    "on-host": {"zero_stage": 3, "offload": frozenset({Offload.OPTIMIZER, Offload.PARAMETERS})},
    "full": {"zero_stage": 1, "recompute": Recompute.FULL},
    "activations-on-host": {"zero_stage": 1, "offload": frozenset({Offload.ACTIVATIONS})},
}


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize(
    ("schedule", "stages_per_rank"),
    [(Schedule.ONE_F_ONE_B, 1), (Schedule.ZERO_BUBBLE, 1), (Schedule.DUALPIPEV, 2)],
)
def test_what_states_move_and_hold_follows(schedule, stages_per_rank, states, monkeypatch):
    changes = {"data_parallel": 2, "zero_group": 2, **STATES[states]}
    plan = layout(
        schedule, ranks=2, num_micro_batches=14, stages_per_rank=stages_per_rank, **changes
    )
    assert_short_rows_say_what_whole_ones_do(plan, range(2), monkeypatch)


def test_one_rank_without_a_pipeline_follows_too(monkeypatch):
    plan = Layout(
        data_parallel=2,
        zero_stage=3,
        zero_group=2,
        num_micro_batches=12,
        layers_per_stage=(2,),
        schedule=Schedule.ONE_F_ONE_B,
    )
    assert_short_rows_say_what_whole_ones_do(
        plan, (0,), monkeypatch, small.llama(num_layers=plan.layers_per_stage[0])
    )


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("schedule", "stages_per_rank"), SCHEDULES)
def test_short_rows_show_every_situation_of_whole_ones(schedule, stages_per_rank, zero_stage):
    for ranks, count in [(2, 7), (4, 13), (4, 16), (5, 24), (8, 36), (16, 64)]:
        sizes = {"pipeline_parallel": ranks, "stages_per_rank": stages_per_rank}
        sizes["num_micro_batches"] = count
        if shape_refusals(PipelineShape(schedule=schedule, **sizes)):
            continue
        plan = layout(
            schedule,
            ranks=ranks,
            num_micro_batches=count,
            stages_per_rank=stages_per_rank,
            zero_stage=zero_stage,
        )
        table, reader = rows_of(plan), RowReader(plan)
        for place in range(ranks):
            row = table.actions(place)
            short = reader.short_row(row)
            assert set(reader.situations(row)) <= set(reader.situations(short))
            kept = {action.micro_batch for action in short}
            assert short == tuple(action for action in row if action.micro_batch in kept)


def test_hundreds_of_micro_batches_follow_from_a_few():
    plan = layout(Schedule.ZERO_BUBBLE, ranks=32, num_micro_batches=480)
    table = rows_of(plan)
    for place in (0, 15, 31):
        short = RowReader(plan).short_row(table.actions(place))
        assert len({action.micro_batch for action in short}) <= 6


def part(**changes):
    return Figures(**{"flops": 0, "num_bytes": {}, "rise": 0, "change": 0, **changes})


def test_a_situation_that_does_two_things_is_seen():
    plan = layout(Schedule.ONE_F_ONE_B, ranks=1)
    kinds = (ActionKind.FORWARD, ActionKind.BACKWARD)
    row = [Action(0, kind, micro_batch) for micro_batch in range(4) for kind in kinds]
    same = [part(flops=1) for _ in row]
    assert len(RowReader(plan).by_situation(row, same)) == len(
        {(k, f) for k in kinds for f in "aml"}
    )
    other = [*same[:4], part(flops=2), *same[5:]]  # the forward of micro-batch 2
    assert RowReader(plan).by_situation(row, other) is None


def test_the_peak_of_parts_is_the_highest_moment_of_any():
    parts = [part(rise=5, change=4), part(rise=3, change=-2), part(rise=4, change=0)]
    assert added(parts).rise == 7
    assert added(parts).change == 2
