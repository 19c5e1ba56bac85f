"""Exact time of a table: when each action starts and ends, for given durations.

    start(a) = max(end of the action before it in its row, end of its producer + transfer)
    end(a)   = start(a) + duration(kind, stage)

Stages may differ, and so may the links between them. A transfer between stages of one rank is
free. `p2p_overlaps` says whether a rank goes on computing while it sends (our runtime; Megatron's
--overlap-p2p-communication), or is held by the transfer (Megatron's default exchange).

For equal stages this gives the closed forms of the papers: idle over busy is (pp - 1) / m for gpipe
and 1f1b, divided by v when interleaved, and (pp - 1) (F + I - W) seconds for zero-bubble.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodels.schedule.action import Action
from costmodels.schedule.build import table_of_shape
from costmodels.schedule.program import EventProgram, compile_program, program_of_shape
from costmodels.schedule.shape import PipelineShape
from costmodels.schedule.table import ScheduleTable


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDurations:
    """Seconds of one micro-batch on each global stage, in model order.

    Attributes:
        forward: Forward pass.
        backward_input: Gradient of the stage's input, with what it recomputes.
        backward_weight: Gradient of its weights.

    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse stages that lack a duration."""
        counts = {len(self.forward), len(self.backward_input), len(self.backward_weight)}
        if len(counts) > 1:
            raise ValueError(f"durations of different numbers of stages: {sorted(counts)}")

    @property
    def by_place(self) -> list[float]:
        """Seconds of forward, backward, backward_input, backward_weight, each stage by stage."""
        whole = map(sum, zip(self.backward_input, self.backward_weight, strict=True))
        return [*self.forward, *whole, *self.backward_input, *self.backward_weight]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """One action on the time axis.

    Attributes:
        start: Seconds since the step began.
        end: Seconds since the step began.

    """

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a step of the pipeline takes.

    Attributes:
        makespan: Seconds from the first action's start to the last one's end.
        busy: Seconds in which each rank computes (or is held by its sends).

    """

    makespan: float
    busy: tuple[float, ...]

    @property
    def idle(self) -> tuple[float, ...]:
        """Seconds in which each rank waits."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble_fraction(self) -> float:
        """Idle seconds of the average rank over the makespan."""
        return sum(self.idle) / len(self.busy) / self.makespan if self.makespan else 0.0


def simulate(
    table: ScheduleTable,
    durations: StageDurations,
    p2p_seconds: float | Sequence[float] = 0.0,
    *,
    p2p_overlaps: bool = True,
) -> Simulation:
    """Simulate a table of compute actions.

    Args:
        table: Without sends and receives; transfers follow from the stages' ranks.
        durations: One entry per global stage.
        p2p_seconds: Seconds of a transfer across a stage boundary, either way; one figure or one
            per boundary (boundary s lies between stages s and s + 1).
        p2p_overlaps: A rank computes while it sends; otherwise the transfer holds it.

    Raises:
        ValueError: The table deadlocks, or a sequence has the wrong length.

    """
    return simulate_rows(table, durations, p2p_seconds, p2p_overlaps=p2p_overlaps)[0]


def timeline(
    table: ScheduleTable,
    durations: StageDurations,
    p2p_seconds: float | Sequence[float] = 0.0,
    *,
    p2p_overlaps: bool = True,
) -> tuple[Interval, ...]:
    """Simulate a table and return every action's interval, rank by rank in row order.

    Args and errors are those of `simulate`; intervals cover computation, not transfers.
    """
    program, ends, _ = run_program(table, durations, p2p_seconds, p2p_overlaps=p2p_overlaps)
    seconds = durations.by_place
    actions = [(rank, code) for rank, row in enumerate(table.rows) for code in row]
    intervals: list[Interval | None] = [None] * len(actions)
    hold = _send_seconds(table.shape, p2p_seconds, p2p_overlaps=p2p_overlaps)
    for at, place, held_until in zip(program.order.tolist(), program.places, ends, strict=True):
        rank, code = actions[at]
        end = held_until - hold[place]
        intervals[at] = Interval(
            rank=rank, action=table.decode(code), start=end - seconds[place], end=end
        )
    return tuple(interval for interval in intervals if interval is not None)


def simulate_rows(
    table: ScheduleTable,
    durations: StageDurations,
    p2p_seconds: float | Sequence[float] = 0.0,
    *,
    p2p_overlaps: bool = True,
) -> tuple[Simulation, list[NDArray[np.float64]]]:
    """Simulate a table and return also when each action of each row lets go of its rank.

    Args and errors are those of `simulate`.
    """
    program, ends, busy = run_program(table, durations, p2p_seconds, p2p_overlaps=p2p_overlaps)
    laid_out = np.empty(len(ends))
    laid_out[program.order] = ends
    rows = np.split(laid_out, np.cumsum([len(row) for row in table.rows])[:-1])
    return Simulation(makespan=max(ends, default=0.0), busy=tuple(busy)), rows


def transfer_seconds(shape: PipelineShape, p2p_seconds: float | Sequence[float]) -> list[float]:
    """Return seconds of each stage boundary, 0 inside a rank; one more 0 for "no transfer".

    Raises:
        ValueError: A sequence that does not have one entry per boundary.

    """
    boundaries = shape.num_stages - 1
    if not isinstance(p2p_seconds, Sequence):
        p2p_seconds = [float(p2p_seconds)] * boundaries
    if len(p2p_seconds) != boundaries:
        raise ValueError(
            f"{len(p2p_seconds)} transfer times for the {boundaries} boundaries of "
            f"{shape.num_stages} stages"
        )
    ranks = shape.rank_of_stage
    crossed = [
        seconds if ranks[s] != ranks[s + 1] else 0.0 for s, seconds in enumerate(p2p_seconds)
    ]
    return [*crossed, 0.0]


def _send_seconds(
    shape: PipelineShape, p2p_seconds: float | Sequence[float], *, p2p_overlaps: bool
) -> list[float]:
    """Seconds for which an action's own send holds its rank, by place."""
    stages = shape.num_stages
    if p2p_overlaps:
        return [0.0] * (4 * stages)
    transfers = transfer_seconds(shape, p2p_seconds)
    down, up = transfers, [0.0, *transfers[:-1]]
    return [*down, *up, *up, *([0.0] * stages)]


def run_program(
    table: ScheduleTable,
    durations: StageDurations,
    p2p_seconds: float | Sequence[float],
    *,
    p2p_overlaps: bool,
) -> tuple[EventProgram, list[float], list[float]]:
    """Return the program, when each of its actions lets go of its rank, and busy seconds.

    Args and errors are those of `simulate`.
    """
    shape = table.shape
    if len(durations.forward) != shape.num_stages:
        raise ValueError(
            f"durations of {len(durations.forward)} stages for a schedule of {shape.num_stages}"
        )
    transfers = transfer_seconds(shape, p2p_seconds)
    hold = _send_seconds(shape, p2p_seconds, p2p_overlaps=p2p_overlaps)
    seconds = [a + b for a, b in zip(durations.by_place, hold, strict=True)]
    # A held rank lets go when the transfer is over, so its value needs no further time.
    delays = transfers if p2p_overlaps else [0.0] * len(transfers)
    own = table is table_of_shape(shape)
    program = program_of_shape(shape) if own else compile_program(table)
    made = [0.0] * program.num_slots
    free = [0.0] * shape.pipeline_parallel
    busy = [0.0] * shape.pipeline_parallel
    ends: list[float] = []
    # The inner loop of every search: plain floats and lists are its fastest form in Python.
    for rank, source, hop, place, target in zip(
        program.ranks, program.sources, program.hops, program.places, program.targets, strict=True
    ):
        start = made[source] + delays[hop]
        if free[rank] > start:  # noqa: PLR1730 - max() costs a call, half the loop's time
            start = free[rank]
        length = seconds[place]
        end = start + length
        free[rank] = made[target] = end
        busy[rank] += length
        ends.append(end)
    return program, ends, busy
