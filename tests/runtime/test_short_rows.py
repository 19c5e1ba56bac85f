"""What follows from a short row is what the whole row does, to the last byte."""

from dataclasses import replace

import lowering_models as small
import pytest

from costmodels.layout import Layout, Offload, Recompute, Schedule
from costmodels.schedule import Action, ActionKind, PipelineShape, shape_refusals
from runtime.dry_run.run import DryRuns
from runtime.dry_run.same_programs import ProgramKeys
from runtime.dry_run.short_rows import Figures, RowReader, added
from runtime.lower import rows_of


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
    transfers = sorted((m.peer, m.operation, m.tag, m.num_bytes) for m in run.messages if m.tag)
    return run.flops, run.num_bytes, run.peak, transfers


class Noting(DryRuns):
    """Notes the rows that are run."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.rows = []

    def _run_row(self, rank, row):
        self.rows.append(row)
        return super()._run_row(rank, row)


class Whole(DryRuns):
    """Runs whole rows."""

    def row_to_run(self, whole, reader, shown):  # noqa: ARG002  (as the base class's)
        return whole


def assert_short_rows_say_what_whole_ones_do(plan, places, *, model=None):
    lowered = small.lowered(model or small.llama(num_layers=plan.num_stages), small.job(), plan)
    for place in places:
        rank = place * plan.num_gpus // plan.pipeline_parallel
        short = Noting(lowered, small.job(), plan)
        found = short.run(rank)
        assert len(short.rows) == 1, "a situation did two things, and the whole row was run"
        assert len({a.micro_batch for a in short.rows[0]}) < plan.num_micro_batches
        assert figures(found) == figures(Whole(lowered, small.job(), plan).run(rank)), place


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
def test_every_rank_of_a_long_row_follows_from_a_short_one(schedule, stages_per_rank):
    plan = layout(schedule, ranks=3, num_micro_batches=12, stages_per_rank=stages_per_rank)
    assert_short_rows_say_what_whole_ones_do(plan, range(3))


STATES = {
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
    "kept": {"zero_stage": 3, "keep_gathered": True},
    "on-host": {"zero_stage": 3, "offload": (Offload.OPTIMIZER, Offload.PARAMETERS)},
    "full": {"zero_stage": 1, "recompute": Recompute.FULL},
    "activations-on-host": {"zero_stage": 1, "offload": (Offload.ACTIVATIONS,)},
}


CASES = [
    *((Schedule.ZERO_BUBBLE, 1, states) for states in STATES),
    (Schedule.ONE_F_ONE_B, 1, "zero3"),
    (Schedule.ONE_F_ONE_B, 1, "kept"),
    (Schedule.DUALPIPEV, 2, "zero1"),
    (Schedule.DUALPIPEV, 2, "zero3"),
]


@pytest.mark.parametrize(("schedule", "stages_per_rank", "states"), CASES)
def test_what_states_move_and_hold_follows(schedule, stages_per_rank, states):
    changes = {"data_parallel": 2, "zero_group": 2, **STATES[states]}
    plan = layout(
        schedule, ranks=2, num_micro_batches=14, stages_per_rank=stages_per_rank, **changes
    )
    assert_short_rows_say_what_whole_ones_do(plan, range(2))


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
        plan, (0,), model=small.llama(num_layers=plan.layers_per_stage[0])
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
        table = rows_of(plan)
        for place in range(ranks):
            row, reader = table.actions(place), RowReader(plan, place)
            short = reader.short_row(row)
            assert set(reader.situations(row)) <= set(reader.situations(short))
            kept = {action.micro_batch for action in short}
            assert short == tuple(action for action in row if action.micro_batch in kept)


@pytest.mark.parametrize(
    ("schedule", "stages_per_rank", "num_micro_batches"),
    [
        (schedule, stages, count)
        for schedule, stages in SCHEDULES
        for count in (4, 9)
        if not shape_refusals(
            PipelineShape(
                schedule=schedule,
                pipeline_parallel=4,
                stages_per_rank=stages,
                num_micro_batches=count,
            )
        )
    ],
)
def test_what_another_rank_has_shown_leaves_rows_that_show_the_rest(
    schedule, stages_per_rank, num_micro_batches
):
    """Without the known first and last micro-batches, those between would be first and last."""
    plan = layout(
        schedule,
        stages_per_rank=stages_per_rank,
        num_micro_batches=num_micro_batches,
        zero_stage=3,
        zero_group=1,
    )
    table = rows_of(plan)
    for other in range(4):
        known = set(RowReader(plan, other).situations(table.actions(other)))
        for place in range(4):
            reader, whole = RowReader(plan, place), table.actions(place)
            shown = known | set(reader.situations(reader.short_row(whole, known)))
            assert shown >= set(reader.situations(whole)), (other, place)


def test_hundreds_of_micro_batches_follow_from_a_few():
    plan = layout(Schedule.ZERO_BUBBLE, ranks=32, num_micro_batches=480)
    table = rows_of(plan)
    for place in (0, 15, 31):
        short = RowReader(plan, place).short_row(table.actions(place))
        assert len({action.micro_batch for action in short}) <= 6


def comparable(run):
    """Return all of a run; the collectives of the micro-batches that were run once of each kind."""
    collectives = {(m.operation, m.ranks, m.peer, m.num_bytes) for m in run.messages if not m.tag}
    return *figures(run), collectives


@pytest.mark.parametrize(
    ("schedule", "stages_per_rank", "zero_stage"),
    [(Schedule.ONE_F_ONE_B, 1, 3), (Schedule.ZERO_BUBBLE, 1, 1), (Schedule.ZBV, 2, 1)],
)
def test_ranks_of_equal_programs_do_what_the_first_has_shown(schedule, stages_per_rank, zero_stage):
    plan = layout(
        schedule,
        ranks=5,
        stages_per_rank=stages_per_rank,
        num_micro_batches=15,
        data_parallel=2,
        zero_group=2,
        zero_stage=zero_stage,
        tensor_parallel=2,
    )
    lowered = small.lowered(small.llama(num_layers=plan.num_stages), small.job(), plan)
    together = Noting(lowered, small.job(), plan)
    num_actions = 0
    for rank in range(0, plan.num_gpus, plan.num_gpus // plan.pipeline_parallel):
        alone = Noting(lowered, small.job(), plan)
        assert comparable(together.run(rank)) == comparable(alone.run(rank))
        num_actions += sum(map(len, alone.rows))
    assert sum(map(len, together.rows)) < 0.8 * num_actions


def test_stages_of_other_layers_are_other_programs():
    plan = Layout(
        pipeline_parallel=4,
        schedule=Schedule.ONE_F_ONE_B,
        num_micro_batches=4,
        layers_per_stage=(1, 1, 2, 1),
        data_parallel=2,
    )
    lowered = small.lowered(small.llama(num_layers=5), small.job(), plan)
    keys = [ProgramKeys(lowered, plan).key(rank) for rank in range(8)]
    assert len(set(keys)) == len(keys)
    plan = replace(plan, layers_per_stage=(1, 2, 1, 1))
    first, *middle, last = (ProgramKeys(lowered, plan).key(rank) for rank in (0, 2, 4, 6))
    assert len({first, *middle, last}) == 4
    plan = replace(plan, layers_per_stage=(2, 1, 1, 1))
    first, *middle, last = (ProgramKeys(lowered, plan).key(rank) for rank in (0, 2, 4, 6))
    assert len({first, *middle, last}) == 3


def part(**changes):
    return Figures(**{"flops": 0, "num_bytes": {}, "rise": 0, "change": 0, **changes})


def test_a_situation_that_does_two_things_is_seen():
    plan = layout(Schedule.ONE_F_ONE_B, ranks=1)
    kinds = (ActionKind.FORWARD, ActionKind.BACKWARD)
    row = [Action(0, kind, micro_batch) for micro_batch in range(4) for kind in kinds]
    same = [part(flops=1) for _ in row]
    reader = RowReader(plan, 0)
    shown = reader.by_situation(row, same, {})
    assert len(shown) == len(kinds) * len(("first", "between", "last"))
    other = [*same[:4], part(flops=2), *same[5:]]  # the forward of micro-batch 2
    assert reader.by_situation(row, other, {}) is None
    assert reader.by_situation(row, [part(flops=3) for _ in row], shown) is None
    assert reader.short_row(row, shown) == ()


def test_the_peak_of_parts_is_the_highest_moment_of_any():
    parts = [part(rise=5, change=4), part(rise=3, change=-2), part(rise=4, change=0)]
    assert added(parts).rise == 7
    assert added(parts).change == 2
