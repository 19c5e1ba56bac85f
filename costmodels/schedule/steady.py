"""Exact time of long steps without simulating all of them: a steady pipeline only repeats.

Rows of m and m - R micro-batches (R a round) differ by one window of actions in the middle. If in
a short step the last three windows of every rank end c seconds after each other, action by action,
then every further window does too, and whatever follows shifts by as much:

    makespan(m + n R) = makespan(m) + n c

Why: end times solve end(a) = max(end of the action before, end of the producer + transfer) +
duration, and a table without deadlock has one solution. Shifting the known end times solves the
long table's equations, given what `_steady_windows` checks: windows are copies of each other, so
are the tails, no action before the cut waits for one behind it, and none behind it waits for one
more than two windows before it. (Max-plus algebra: a periodic regime, recognised when
it is reached; see Baccelli, Cohen, Olsder and Quadrat, "Synchronization and Linearity", 1992,
chapter 3.)

A pipeline that has not settled after a few fillings is simulated in full.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from costmodels.layout import Schedule
from costmodels.schedule.build import table_of_shape
from costmodels.schedule.program import program_of_shape
from costmodels.schedule.shape import PipelineShape, require_admitted
from costmodels.schedule.simulation import Simulation, StageDurations, simulate, simulate_rows
from costmodels.schedule.table import Row

TRIED_FILLINGS = (6, 24)  # chosen: lengths of the short steps that are tried, in pipelines full
SAME = 1e-13  # chosen: spacings that differ by less than this share of the step are rounding

# One window of a rank: where it begins in the row and how many actions it has.
Window = tuple[int, int]


def simulate_schedule(  # noqa: PLR0917 - the four sizes of `build_schedule`, then `simulate`
    schedule: Schedule,
    pipeline_parallel: int,
    stages_per_rank: int,
    num_micro_batches: int,
    durations: StageDurations,
    p2p_seconds: float | Sequence[float] = 0.0,
    *,
    p2p_overlaps: bool = True,
) -> Simulation:
    """Return `simulate` of `build_schedule` of these arguments, in time that m hardly matters to.

    Equal up to rounding; see `build_schedule` and `simulate` for arguments and errors.
    """
    shape = PipelineShape(
        schedule=Schedule(schedule),
        pipeline_parallel=pipeline_parallel,
        stages_per_rank=stages_per_rank,
        num_micro_batches=num_micro_batches,
    )
    require_admitted(shape)
    for fillings in TRIED_FILLINGS:
        short = shape.shortened(fillings)
        windows = _steady_windows(short) if short is not shape else None
        if windows is None:
            continue
        table = table_of_shape(short)
        result, ends = simulate_rows(table, durations, p2p_seconds, p2p_overlaps=p2p_overlaps)
        spacing = _spacing(ends, windows)
        if spacing is not None:
            more = num_micro_batches - short.num_micro_batches
            scale = num_micro_batches / short.num_micro_batches
            return Simulation(
                makespan=result.makespan + more // short.micro_batches_per_round * spacing,
                busy=tuple(busy * scale for busy in result.busy),
            )
    return simulate(table_of_shape(shape), durations, p2p_seconds, p2p_overlaps=p2p_overlaps)


def _spacing(ends: list[NDArray[np.float64]], windows: tuple[Window, ...]) -> float | None:
    """Return the seconds between the last three windows if they are the same everywhere."""
    last = max(float(of_rank[-1]) for of_rank in ends)
    gaps = np.concatenate(
        [
            of_rank[start - shift : start - shift + length]
            - of_rank[start - shift - length : start - shift]
            for of_rank, (start, length) in zip(ends, windows, strict=True)
            for shift in (0, length)
        ]
    )
    spread = float(gaps.max() - gaps.min())
    return float(gaps.mean()) if spread <= SAME * last else None


@lru_cache(maxsize=256)
def _steady_windows(shape: PipelineShape) -> tuple[Window, ...] | None:
    """Return the last steady window of every rank; None where the table does not simply repeat."""
    size = shape.micro_batches_per_round
    shorter = replace(shape, num_micro_batches=shape.num_micro_batches - size)
    pairs = list(zip(table_of_shape(shorter).rows, table_of_shape(shape).rows, strict=True))
    windows = []
    for short_row, row in pairs:
        places, micro_batches = np.divmod(np.asarray(row), shape.num_micro_batches)
        short_places, short_batches = np.divmod(np.asarray(short_row), shorter.num_micro_batches)
        count = len(short_row)
        differs = (places[:count] != short_places) | (micro_batches[:count] != short_batches)
        start, length = int(np.argmax(differs)) if differs.any() else count, len(row) - count
        if start < 2 * length:
            return None
        parts = [slice(start - i * length, start - (i - 1) * length) for i in (2, 1, 0)]
        repeats = all(
            np.array_equal(places[a], places[b])
            and np.array_equal(micro_batches[a] + size, micro_batches[b])
            for a, b in pairwise(parts)
        )
        tail = slice(start + length, None)
        drains = np.array_equal(places[tail], short_places[start:]) and np.array_equal(
            micro_batches[tail], short_batches[start:] + size
        )
        if not (repeats and drains):
            return None
        windows.append((start, length))
    rows = tuple(row for _, row in pairs)
    return tuple(windows) if _cut_is_clean(shape, rows, windows) else None


def _cut_is_clean(shape: PipelineShape, rows: tuple[Row, ...], windows: list[Window]) -> bool:
    """Whether waits cross the cut before the last windows only forwards, and not from far."""
    program = program_of_shape(shape)
    lengths = [len(row) for row in rows]
    firsts = np.cumsum([0, *lengths[:-1]])
    ranks, order = np.asarray(program.ranks), program.order
    starts = np.asarray([start for start, _ in windows])
    reach = 2 * np.asarray([length for _, length in windows])
    # Position of each action relative to its rank's cut, and the same by the slot it fills.
    relative = order - firsts[ranks] - starts[ranks]
    made_at = np.zeros(program.num_slots, dtype=np.int64)
    made_by = np.zeros(program.num_slots, dtype=np.int64)
    made_at[program.targets], made_by[program.targets] = relative, ranks
    sources = np.asarray(program.sources)
    waits = sources < program.num_slots - 2  # the last two slots are nobody's
    behind = relative[waits] >= 0
    source_at = made_at[sources[waits]]
    near = source_at >= -reach[made_by[sources[waits]]]
    return bool(np.all(np.where(behind, near, source_at < 0)))
