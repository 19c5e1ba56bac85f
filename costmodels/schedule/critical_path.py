"""The path that a makespan is made of: how often each stage works on it, and what it waits for.

A simulated table is an event graph, and its makespan the length of the longest path through it. The
same path is there whatever the durations, so its length under others is a lower bound of their
makespan, and their makespan itself where it is still the longest one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodels.schedule.action import BACKWARD_CODE, FORWARD_CODE, INPUT_CODE, WEIGHT_CODE
from costmodels.schedule.simulation import StageDurations, run_program, transfer_seconds
from costmodels.schedule.table import ScheduleTable


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPath:
    """What lies on one path through a table.

    Attributes:
        work: Times that it runs through each stage's forward, backward_input and backward_weight:
            [3, stages]. A whole backward is one of each.
        transfers: Times that it waits for a transfer across each stage boundary: [stages - 1].

    """

    work: NDArray[np.int64]
    transfers: NDArray[np.int64]

    def seconds(
        self, durations: NDArray[np.float64], transfers: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the path's length under other durations, none of them negative.

        Args:
            durations: Forward, backward_input and backward_weight: [rows, 3, stages].
            transfers: Across each boundary, 0 inside a rank: [rows, stages - 1].

        """
        length: NDArray[np.float64] = (
            np.einsum("rps,ps->r", durations, self.work) + transfers @ self.transfers
        )
        return length


def critical_path(
    table: ScheduleTable,
    durations: StageDurations,
    p2p_seconds: float | Sequence[float] = 0.0,
    *,
    p2p_overlaps: bool = True,
) -> CriticalPath:
    """Simulate a table and return a longest path through it.

    Args and errors are those of `simulate`.
    """
    program, ends, _ = run_program(table, durations, p2p_seconds, p2p_overlaps=p2p_overlaps)
    delays = transfer_seconds(table.shape, p2p_seconds) if p2p_overlaps else None
    makers = dict(zip(program.targets, range(len(ends)), strict=True))
    before: list[int | None] = []
    last: dict[int, int] = {}
    for number, rank in enumerate(program.ranks):
        before.append(last.get(rank))
        last[rank] = number
    places = np.zeros(4 * table.shape.num_stages, dtype=np.int64)
    waited = np.zeros(table.shape.num_stages, dtype=np.int64)
    at: int | None = max(range(len(ends)), key=ends.__getitem__, default=None)
    while at is not None:
        places[program.places[at]] += 1
        previous, maker = before[at], makers.get(program.sources[at])
        hop = program.hops[at]
        arrival = -1.0 if maker is None else ends[maker] + (delays[hop] if delays else 0.0)
        if previous is None or arrival > ends[previous]:
            waited[hop] += maker is not None
            at = maker
        else:
            at = previous
    return _as_path(places.reshape(4, -1), waited[:-1], held=not p2p_overlaps)


def _as_path(places: NDArray[np.int64], waited: NDArray[np.int64], *, held: bool) -> CriticalPath:
    work = np.stack(
        [
            places[FORWARD_CODE],
            places[BACKWARD_CODE] + places[INPUT_CODE],
            places[BACKWARD_CODE] + places[WEIGHT_CODE],
        ]
    )
    if held:  # every output and every gradient on the path holds its rank while it is sent
        waited = work[0, :-1] + work[1, 1:]
    return CriticalPath(work=work, transfers=waited)
