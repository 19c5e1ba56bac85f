"""A table in an order in which it can run: what simulation and validation walk through.

Between ranks an action waits for one value only: a forward for the output of the stage before, a
backward (whole or input half) for the gradient from the stage after. Everything else an action
needs was made on its own rank, earlier in its row. So a table is an event graph with two edges
into each action, and it runs iff that graph has no cycle.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from costmodels.schedule.action import BACKWARD_CODE, FORWARD_CODE, INPUT_CODE
from costmodels.schedule.build import table_of_shape
from costmodels.schedule.shape import PipelineShape
from costmodels.schedule.table import ScheduleTable, format_grid


@dataclass(frozen=True, slots=True, kw_only=True)
class EventProgram:
    """Compute actions in dependency order, as parallel columns.

    A value (an output or a gradient) has a slot; two more slots stand for "nothing to wait for"
    (the last but one) and "nobody waits for this" (the last).

    Attributes:
        order: Position of each action in the rows laid end to end.
        ranks: Rank of each action.
        sources: Slot that it waits for.
        hops: Stage boundary that the awaited value crossed; boundary s lies after stage s, the
            last one stands for none.
        places: kind * num_stages + stage, the key of its duration.
        targets: Slot of the value that it makes.
        num_slots: Slots in all.

    """

    order: NDArray[np.int64]
    ranks: list[int]
    sources: list[int]
    hops: list[int]
    places: list[int]
    targets: list[int]
    num_slots: int


@lru_cache(maxsize=256)
def program_of_shape(shape: PipelineShape) -> EventProgram:
    """Return the program of a shape's own table."""
    return compile_program(table_of_shape(shape))


def compile_program(table: ScheduleTable) -> EventProgram:
    """Put a table of compute actions in dependency order.

    Raises:
        ValueError: The ranks block each other; the message draws the grid at the action that
            waits in vain.

    """
    stages, m = table.shape.num_stages, table.shape.num_micro_batches
    values = stages * m
    nothing, nobody = 2 * values, 2 * values + 1
    codes = np.concatenate([np.asarray(row, dtype=np.int64) for row in table.rows])
    if codes.max(initial=0) >= 4 * values:
        raise ValueError("only compute actions can be simulated; leave sends and receives out")
    ranks = np.repeat(np.arange(len(table.rows)), [len(row) for row in table.rows])
    places = codes // m
    kind, stage = np.divmod(places, stages)
    is_forward = kind == FORWARD_CODE
    is_backward = (kind == BACKWARD_CODE) | (kind == INPUT_CODE)
    gradient = values + stage * m + codes % m
    targets = np.where(is_forward, codes, np.where(is_backward, gradient, nobody))
    sources = np.full_like(codes, nothing)
    hops = np.full_like(codes, stages - 1)
    waits = is_forward & (stage > 0)
    sources[waits], hops[waits] = codes[waits] - m, stage[waits] - 1
    waits = is_backward & (stage < stages - 1)
    sources[waits], hops[waits] = gradient[waits] + m, stage[waits]
    order = np.asarray(_dependency_order(table, sources.tolist(), targets.tolist(), nothing))
    return EventProgram(
        order=order,
        ranks=ranks[order].tolist(),
        sources=sources[order].tolist(),
        hops=hops[order].tolist(),
        places=places[order].tolist(),
        targets=targets[order].tolist(),
        num_slots=2 * values + 2,
    )


def _dependency_order(
    table: ScheduleTable, sources: list[int], targets: list[int], nothing: int
) -> list[int]:
    """Run every rank until it waits, wake it when its value is made, until all are done."""
    ends = np.cumsum([len(row) for row in table.rows]).tolist()
    position = [end - len(row) for end, row in zip(ends, table.rows, strict=True)]
    made = bytearray(nothing + 2)
    made[nothing] = 1
    waiting = [-1] * (nothing + 2)
    order: list[int] = []
    runnable = list(range(len(table.rows) - 1, -1, -1))
    while runnable:
        rank = runnable.pop()
        at, end = position[rank], ends[rank]
        first = at
        while at < end and made[sources[at]]:
            target = targets[at]
            made[target] = 1
            at += 1
            if waiting[target] >= 0:
                runnable.append(waiting[target])
        order.extend(range(first, at))
        position[rank] = at
        if at < end:
            waiting[sources[at]] = rank
    if len(order) < len(sources):
        _raise_deadlock(table, position, ends)
    return order


def _raise_deadlock(table: ScheduleTable, position: list[int], ends: list[int]) -> None:
    rank = next(r for r, at in enumerate(position) if at < ends[r])
    step = position[rank] - ends[rank] + len(table.rows[rank])
    action = table.decode(table.rows[rank][step])
    raise ValueError(
        f"deadlock: rank {rank} waits in step {step} for what {action} needs, and the rank that "
        f"should make it waits too or never does\n{format_grid(table, (rank, step))}"
    )
