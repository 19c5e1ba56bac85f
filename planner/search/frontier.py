"""Best-first refinement of the space: partial layouts become complete ones in order of bound.

    cells      degrees, micro-batch, sequence and context choices; any schedule
    schedules  and the schedule with its stages per rank, and what the last of them gives up
    tight      and the layers that must be recomputed to fit under the leanest states
    complete   and ZeRO, rank order, recomputation, offload; the real bounds of time and memory
    ready      the same, bounded by pipelines of the same shape that were simulated meanwhile

Each level's bound holds for everything below it. Rows wait in pools, sorted; the pool with the
smallest next bound is refined a block at a time, in one vectorised call, so that little more is
unfolded than what may still win. Complete layouts come out one by one in ascending bound.
"""

import heapq
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf

import numpy as np

from planner.search.costs import Values
from planner.search.priced import PricedLayout, PricedTable
from planner.search.row_bounds import RowBounds
from planner.search.space import Partial, Space, root, unfold


class Level(IntEnum):
    """How far a row is decided."""

    CELLS = 0
    SCHEDULES = 1
    TIGHT = 2
    COMPLETE = 3
    READY = 4


# Rows refined at once: large enough for numpy, small enough to stop soon after the answer.
BLOCK = {
    Level.CELLS: 4096,
    Level.SCHEDULES: 4096,
    Level.TIGHT: 256,
    Level.COMPLETE: 64,
    Level.READY: 1,
}


@dataclass(slots=True, kw_only=True)
class _Pool:
    """Rows of one level in ascending bound, and the next to come out; complete ones are priced."""

    level: Level
    rows: Partial | PricedTable
    bound: Values
    next_row: int = 0

    def head(self) -> float:
        return float(self.bound[self.next_row])


@dataclass(slots=True, kw_only=True)
class Frontier:
    """Everything that may still win.

    Attributes:
        bounds: What rows are ordered by.
        num_bounded: Rows whose bound was computed.

    """

    space: Space
    bounds: RowBounds
    num_bounded: int = 0
    _heap: list[tuple[float, int, _Pool]] = field(default_factory=list)
    _made: int = 0

    def start(self) -> None:
        """Unfold the cells of the space."""
        cells = unfold(self.space, root(self.space), "context_parallel_type")
        self._add(Level.CELLS, cells, self.bounds.open_seconds(cells.table, schedule_is_open=True))

    def pop(self, cutoff: float) -> tuple[float, PricedLayout] | None:
        """Return the smallest bound of a complete layout, and that layout with its row's split.

        None when nothing below the cutoff is left.
        """
        while self._heap and self._heap[0][0] < cutoff:
            _, _, pool = heapq.heappop(self._heap)
            first = pool.next_row
            stop = min(first + BLOCK[pool.level], int(np.searchsorted(pool.bound, cutoff)))
            pool.next_row = stop
            self._push(pool)
            if pool.level is Level.READY and isinstance(pool.rows, PricedTable):
                return float(pool.bound[first]), pool.rows.layout(first)
            block = pool.rows.take(np.arange(first, stop))
            self._refine(pool.level, block, pool.bound[first:stop], cutoff)
        return None

    def least_bound(self) -> float:
        """Return the smallest bound of what is left; inf when nothing is."""
        return self._heap[0][0] if self._heap else inf

    def _push(self, pool: _Pool) -> None:
        if pool.next_row < len(pool.bound):
            self._made += 1
            heapq.heappush(self._heap, (pool.head(), self._made, pool))

    def _add(self, level: Level, rows: Partial | PricedTable, bound: Values) -> None:
        self.num_bounded += len(bound)
        order = np.argsort(bound, kind="stable")
        self._push(_Pool(level=level, rows=rows.take(order), bound=bound[order]))

    def _refine(
        self, level: Level, block: Partial | PricedTable, bound: Values, cutoff: float
    ) -> None:
        """Replace a block of rows by what they unfold into, below the cutoff."""
        below: Partial | PricedTable
        if isinstance(block, PricedTable):
            below, seconds = block, self.bounds.referenced(block, bound)
        elif level is Level.CELLS:
            below = unfold(self.space, block, "lighter_last")
            seconds = self.bounds.open_seconds(below.table, schedule_is_open=False)
        elif level is Level.SCHEDULES:
            below, seconds = block, np.maximum(self.bounds.tight_seconds(block.table), bound)
        else:
            below, seconds = self.bounds.complete(block, cutoff)
        keep = np.flatnonzero(seconds < cutoff)
        if len(keep):
            self._add(Level(level + 1), below.take(keep), np.maximum(seconds[keep], bound[0]))
