"""Sends and receives of a table: which action passes what on, and where both ends stand."""

from dataclasses import dataclass

from costmodels.schedule.action import Action, ActionKind
from costmodels.schedule.shape import PipelineShape
from costmodels.schedule.simulation import StageDurations, timeline
from costmodels.schedule.table import ScheduleTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What one action passes to another rank.

    Attributes:
        send: Belongs to the producer's rank.
        receive: Belongs to the consumer's rank.

    """

    send: Action
    receive: Action


def message_of(shape: PipelineShape, action: Action) -> Message | None:
    """Return the message that follows an action; None where its value stays on the rank.

    Outputs of forwards go to the next stage, gradients of inputs (from a whole backward or its
    input half) to the stage before.
    """
    if action.kind is ActionKind.FORWARD:
        peer, kinds = action.stage + 1, (ActionKind.SEND_FORWARD, ActionKind.RECV_FORWARD)
    elif action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT):
        peer, kinds = action.stage - 1, (ActionKind.SEND_BACKWARD, ActionKind.RECV_BACKWARD)
    else:
        return None
    ranks = shape.rank_of_stage
    if not 0 <= peer < shape.num_stages or ranks[peer] == ranks[action.stage]:
        return None
    return Message(
        send=Action(action.stage, kinds[0], action.micro_batch),
        receive=Action(peer, kinds[1], action.micro_batch),
    )


def with_communication(table: ScheduleTable) -> ScheduleTable:
    """Add the sends and receives that a table of compute actions needs between ranks.

    A send follows its producer at once; its receive stands where the other rank is at that moment
    when every forward and every half backward takes one unit of time. Both ends enter their rows in
    the order of that one clock, so it is an order in which all ranks proceed even if sends and
    receives block until the other side has arrived.

    Raises:
        ValueError: The table deadlocks, or holds sends or receives already.

    """
    shape = table.shape
    unit = (1.0,) * shape.num_stages
    durations = StageDurations(forward=unit, backward_input=unit, backward_weight=unit)
    # At equal times messages come first: they were made by what has just ended.
    events: list[tuple[float, bool, int, int]] = []
    intervals = timeline(table, durations)
    steps = [step for row in table.rows for step in range(len(row))]
    for index, (interval, step) in enumerate(zip(intervals, steps, strict=True)):
        events.append((interval.start, True, step, index))
        events.append((interval.end, False, step, index))
    rows: tuple[list[int], ...] = tuple([] for _ in table.rows)
    for _, starts, _, index in sorted(events):
        rank, action = intervals[index].rank, intervals[index].action
        if starts:
            rows[rank].append(table.encode(action))
        elif (message := message_of(shape, action)) is not None:
            rows[rank].append(table.encode(message.send))
            receiver = shape.rank_of_stage[message.receive.stage]
            rows[receiver].append(table.encode(message.receive))
    return ScheduleTable(shape=shape, rows=tuple(map(tuple, rows)))
