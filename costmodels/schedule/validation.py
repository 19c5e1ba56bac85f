"""What makes a table a schedule; a wrong one is refused with the grid drawn at the bad step.

placement   every action stands on the rank that holds its stage
complete    each stage runs each micro-batch once: F, and either B or both I and W
order       F before B or I, I before W
messages    (with sends and receives) a send after its producer, a receive before its consumer,
            one pair for every value that crosses ranks
progress    no deadlock, even if sends and receives block until both sides have arrived
"""

from collections.abc import Iterator

from costmodels.schedule.action import COMPUTE_KINDS, Action, ActionKind
from costmodels.schedule.communication import message_of
from costmodels.schedule.program import compile_program
from costmodels.schedule.table import ScheduleTable, format_grid

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT  # noqa: E741 - torch's letter
_SENDS = (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD)
_PRODUCERS = {ActionKind.SEND_FORWARD: (F,), ActionKind.SEND_BACKWARD: (B, I)}
_RECEIVE_OF = {F: ActionKind.RECV_FORWARD, B: ActionKind.RECV_BACKWARD, I: ActionKind.RECV_BACKWARD}


def validate(table: ScheduleTable) -> None:
    """Refuse a table that is no schedule.

    Args:
        table: Compute actions alone, or with all sends and receives.

    Raises:
        ValueError: With the broken rule and the grid around the step that breaks it.

    """
    if len(table.rows) != table.shape.pipeline_parallel:
        raise ValueError(
            f"{len(table.rows)} rows for {table.shape.pipeline_parallel} pipeline ranks"
        )
    communicates = any(not a.is_compute for _, _, a in _steps(table))
    for rank in range(len(table.rows)):
        _check_row(table, rank, communicates=communicates)
    _check_complete(table, communicates=communicates)
    if communicates:
        _check_rendezvous(table)
    else:
        compile_program(table)


def _steps(table: ScheduleTable) -> Iterator[tuple[int, int, Action]]:
    for rank in range(len(table.rows)):
        for step, action in enumerate(table.actions(rank)):
            yield rank, step, action


def _refuse(table: ScheduleTable, rank: int, step: int, problem: str) -> None:
    raise ValueError(f"rank {rank}, step {step}: {problem}\n{format_grid(table, (rank, step))}")


def _check_row(table: ScheduleTable, rank: int, *, communicates: bool) -> None:
    """Check placement and order within one rank, messages included."""
    shape = table.shape
    done: set[Action] = set()
    for step, action in enumerate(table.actions(rank)):
        holder = shape.rank_of_stage[action.stage]
        problem = None
        if holder != rank:
            problem = f"{action} belongs to rank {holder}, which holds stage {action.stage}"
        elif action in done:
            problem = f"{action} comes twice"
        else:
            missing = _missing_before(table, action, done, communicates=communicates)
            if missing:
                problem = f"{action} comes before {missing}"
        if problem is not None:
            _refuse(table, rank, step, problem)
        done.add(action)


def _missing_before(
    table: ScheduleTable, action: Action, done: set[Action], *, communicates: bool
) -> str | None:
    """Name what must stand earlier in the row and does not."""
    stage, m = action.stage, action.micro_batch

    def absent(*kinds: ActionKind) -> bool:
        return not any(Action(stage, kind, m) in done for kind in kinds)

    before: tuple[ActionKind, ...] = ()
    if action.kind in (B, I):
        before = (F,)
    elif action.kind is W:
        before = (I,)
    elif action.kind in _SENDS:
        before = _PRODUCERS[action.kind]
    if before and absent(*before):
        return f"its {' or '.join(str(Action(stage, kind, m)) for kind in before)}"
    receive = _RECEIVE_OF.get(action.kind)
    if communicates and receive and _is_received(table, action) and absent(receive):
        return f"its {Action(stage, receive, m)}"
    return None


def _is_received(table: ScheduleTable, action: Action) -> bool:
    """Whether what a forward or backward waits for comes from another rank."""
    ranks = table.shape.rank_of_stage
    peer = action.stage - 1 if action.kind is F else action.stage + 1
    return 0 <= peer < len(ranks) and ranks[peer] != ranks[action.stage]


def _check_complete(table: ScheduleTable, *, communicates: bool) -> None:
    """Check that every stage runs every micro-batch once, and that every message has two ends."""
    present = {action for _, _, action in _steps(table)}
    shape = table.shape
    for stage in range(shape.num_stages):
        for m in range(shape.num_micro_batches):
            f, b, i, w = (Action(stage, kind, m) in present for kind in COMPUTE_KINDS)
            if not f or (b, i, w) not in ((True, False, False), (False, True, True)):
                kinds = ", ".join(k for k, has in zip("FBIW", (f, b, i, w), strict=True) if has)
                raise ValueError(
                    f"stage {stage} must run micro-batch {m} as F and B, or as F, I and W; "
                    f"the table holds {kinds or 'nothing'}"
                )
    if not communicates:
        return
    messages = [message_of(shape, action) for action in present if action.is_compute]
    needed = {end for message in messages if message for end in (message.send, message.receive)}
    ends = {action for action in present if not action.is_compute}
    for action in sorted(needed ^ ends, key=str):
        raise ValueError(f"{action} is {'missing' if action in needed else 'not needed'}")


def _check_rendezvous(table: ScheduleTable) -> None:
    """Run the rows with sends and receives that block until the other side has arrived."""
    shape = table.shape
    rows = [table.actions(rank) for rank in range(len(table.rows))]
    # The two ends of a message, each to the other and to the rank where that stands.
    other_end: dict[Action, tuple[int, Action]] = {}
    for row in rows:
        for action in row:
            if (message := message_of(shape, action)) is not None:
                ranks = shape.rank_of_stage
                other_end[message.send] = (ranks[message.receive.stage], message.receive)
                other_end[message.receive] = (ranks[message.send.stage], message.send)
    at = [0] * len(rows)
    runnable = list(range(len(rows)))
    while runnable:
        rank = runnable.pop()
        while at[rank] < len(rows[rank]):
            action = rows[rank][at[rank]]
            if not action.is_compute:
                peer, match = other_end[action]
                if at[peer] == len(rows[peer]) or rows[peer][at[peer]] != match:
                    break
                at[peer] += 1
                runnable.append(peer)
            at[rank] += 1
    for rank, row in enumerate(rows):
        if at[rank] < len(row):
            peer, match = other_end[row[at[rank]]]
            _refuse(
                table, rank, at[rank], f"deadlock: {row[at[rank]]} waits for {match} on rank {peer}"
            )
