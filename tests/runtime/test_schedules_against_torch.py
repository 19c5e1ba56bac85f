"""Torch's own generators and validators are the oracle for our tables.

Every class below is torch's; only their table-making methods run, on a bare object that holds the
few numbers they read, so no process group and no stage modules are needed.
"""

import types

import pytest
import torch.distributed.pipelining.schedules as torch_schedules
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from costmodels.layout import Schedule
from costmodels.schedule import (
    Action,
    PipelineShape,
    ScheduleTable,
    build_schedule,
    parse_action,
    shape_refusals,
    table_from_strings,
    with_communication,
)

TORCH_CLASSES = {
    Schedule.GPIPE: torch_schedules.ScheduleGPipe,
    Schedule.ONE_F_ONE_B: torch_schedules.Schedule1F1B,
    Schedule.INTERLEAVED: torch_schedules.ScheduleInterleaved1F1B,
    Schedule.ZERO_BUBBLE: torch_schedules.ScheduleInterleavedZeroBubble,
    Schedule.ZBV: torch_schedules.ScheduleZBVZeroBubble,
    Schedule.DUALPIPEV: torch_schedules.ScheduleDualPipeV,
}


def admitted_shapes(schedule, *, ranks=range(1, 6), stages=range(1, 4), counts=range(1, 21)):
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
                    yield shape


def build(shape):
    return build_schedule(
        shape.schedule, shape.pipeline_parallel, shape.stages_per_rank, shape.num_micro_batches
    )


def torch_rows(shape):
    """Rows of action strings as torch's generator makes them, no-ops and reductions left out."""
    pp, v, m = shape.pipeline_parallel, shape.stages_per_rank, shape.num_micro_batches
    cls = TORCH_CLASSES[shape.schedule]
    bare = types.SimpleNamespace(
        pp_group_size=pp,
        n_local_stages=v,
        num_stages=pp * v,
        _num_stages=pp * v,
        _n_microbatches=m,
        number_of_rounds=max(1, m // pp),
        microbatches_per_round=m // max(1, m // pp),
    )
    if shape.schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B):
        order = cls._get_pipeline_order(bare)
    else:
        order = {rank: cls._calculate_single_rank_operations(bare, rank) for rank in range(pp)}
    return tuple(tuple(map(str, flatten(order[rank]))) for rank in range(pp))


def flatten(actions):
    """Drop no-ops and gradient reductions, and put overlapped pairs one after the other."""
    for action in actions:
        if action is None or action.computation_type == torch_schedules.REDUCE_GRAD:
            continue
        yield from action.sub_actions or (action,)


def torch_table(table):
    """Return a table of ours as torch's dictionary of its own actions."""
    return {
        rank: [torch_schedules._Action.from_str(text) for text in row]
        for rank, row in enumerate(table.strings())
    }


@pytest.mark.parametrize("schedule", [s for s in Schedule if s is not Schedule.ONE_F_ONE_B])
def test_tables_equal_torchs_generators_action_by_action(schedule):
    shapes = list(admitted_shapes(schedule))
    assert shapes
    compared = 0
    for shape in shapes:
        torch_admits = shape.num_micro_batches % max(
            1, shape.num_micro_batches // shape.pipeline_parallel
        )
        if schedule is Schedule.ZERO_BUBBLE and torch_admits != 0:
            continue  # with one stage per rank rounds mean nothing; torch refuses all the same
        assert build(shape).strings() == torch_rows(shape), shape
        compared += 1
    assert compared > len(shapes) // 2


def test_1f1b_equals_torchs_wherever_torch_admits_it():
    for shape in admitted_shapes(Schedule.ONE_F_ONE_B):
        if shape.num_micro_batches >= shape.num_stages:  # torch refuses fewer
            ours, theirs = build(shape).strings(), torch_rows(shape)
            assert ours[:-1] == theirs[:-1], shape
            # The table that torch 2.13 draws for its last rank counts forwards from 1; its runtime,
            # which does not read that table, counts them from 0 as every other rank does.
            last = shape.num_stages - 1
            pairs = [(f"{last}F{i + 1}", f"{last}B{i}") for i in range(shape.num_micro_batches)]
            assert theirs[-1] == tuple(text for pair in pairs for text in pair)
            assert ours[-1] == tuple(
                text.replace(f"{last}F{i + 1}", f"{last}F{i}")
                for i, pair in enumerate(pairs)
                for text in pair
            )


@pytest.mark.parametrize("schedule", list(Schedule))
def test_torchs_validator_accepts_every_table(schedule):
    for shape in admitted_shapes(schedule, counts=range(1, 13)):
        mapping = torch_schedules._validate_schedule(
            torch_table(build(shape)),
            shape.pipeline_parallel,
            shape.num_stages,
            shape.num_micro_batches,
        )
        assert mapping == dict(enumerate(shape.rank_of_stage))


@pytest.mark.parametrize("schedule", list(Schedule))
def test_torchs_simulator_runs_every_table_with_its_communication(schedule):
    for shape in admitted_shapes(schedule, ranks=(1, 2, 4), counts=(1, 3, 4, 8, 12)):
        rows = torch_table(with_communication(build(shape)))
        expected = {rank: list(row) for rank, row in rows.items()}
        simulated = torch_schedules._simulate_comms_compute(
            rows, lambda stage, shape=shape: shape.rank_of_stage[stage], shape.num_stages
        )
        ran = {rank: [a for a in row if a is not None] for rank, row in simulated.items()}
        assert ran == expected


@pytest.mark.parametrize("schedule", list(Schedule))
def test_our_communication_passes_the_same_messages_as_torchs(schedule):
    for shape in admitted_shapes(schedule, ranks=(2, 4), counts=(3, 4, 8)):
        ours = with_communication(build(shape)).strings()
        theirs = torch_schedules._add_send_recv(
            torch_table(build(shape)),
            lambda stage, shape=shape: shape.rank_of_stage[stage],
            shape.num_stages,
        )
        for rank, row in enumerate(ours):
            assert sorted(row) == sorted(map(str, theirs[rank])), (shape, rank)


@pytest.mark.parametrize("schedule", [Schedule.ZBV, Schedule.DUALPIPEV])
def test_v_shaped_stages_lie_on_torchs_ranks(schedule):
    for pp in range(2, 9):
        shape = PipelineShape(
            schedule=schedule, pipeline_parallel=pp, stages_per_rank=2, num_micro_batches=2 * pp
        )
        expected = generate_stage_to_rank_mapping(pp, 2 * pp, style="v")
        assert dict(enumerate(shape.rank_of_stage)) == expected


@pytest.mark.parametrize("kind", ["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"])
def test_action_strings_are_torchs_both_ways(kind):
    text = f"12{kind}345"
    ours, theirs = parse_action(text), torch_schedules._Action.from_str(text)
    assert isinstance(ours, Action)
    assert str(ours) == str(theirs) == text
    assert (ours.stage, ours.micro_batch) == (theirs.stage_index, theirs.microbatch_index)
    assert ours.kind.value == theirs.computation_type.value


def test_torchs_table_is_read_back_as_ours():
    shape = PipelineShape(
        schedule=Schedule.ZBV, pipeline_parallel=3, stages_per_rank=2, num_micro_batches=7
    )
    read = table_from_strings(shape, torch_rows(shape))
    assert isinstance(read, ScheduleTable)
    assert read == build(shape)
