"""Best-first refinement of the space: partial layouts become complete ones in order of bound.

    cells      degrees, micro-batch, sequence and context choices; any schedule
    schedules  and the schedule with its stages per rank
    tight      and the layers that must be recomputed to fit under the leanest states
    complete   and ZeRO, rank order, recomputation, offload; the real bounds of time and memory

Each level's bound holds for everything below it. Rows wait in pools, sorted; the pool with the
smallest next bound is refined a block at a time, in one vectorised call, so that little more is
unfolded than what may still win. Complete layouts come out one by one in ascending bound.
"""

import heapq
from collections import Counter
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import product
from math import inf

import numpy as np

from costmodels.layout import Recompute
from costmodels.layout_table import RECOMPUTES, IntColumn, LayoutTable
from costmodels.pipeline_bound import SplitLimits
from planner.costs import Costs, Values
from planner.rules.rule import CUTS_PARAMETERS
from planner.space import Partial, Space, root, unfold, unfold_with_parents
from planner.splits import smallest_stage

FULL = RECOMPUTES.index(Recompute.FULL)


RANGE = 4  # chosen: recomputed layers are bounded in ranges a quarter wide


class Level(IntEnum):
    """How far a row is decided."""

    CELLS = 0
    SCHEDULES = 1
    TIGHT = 2
    COMPLETE = 3


# Rows refined at once: large enough for numpy, small enough to stop soon after the answer.
BLOCK = {Level.CELLS: 4096, Level.SCHEDULES: 4096, Level.TIGHT: 256, Level.COMPLETE: 1}


@dataclass(slots=True, kw_only=True)
class _Pool:
    """Rows of one level in ascending bound, and the next to come out."""

    level: Level
    partial: Partial
    bound: Values
    next_row: int = 0

    def head(self) -> float:
        return float(self.bound[self.next_row])


@dataclass(slots=True, kw_only=True)
class Frontier:
    """Everything that may still win.

    Attributes:
        limit: Bytes that a rank may reserve.
        dropped: Rows that a memory bound excluded, by rule.
        num_bounded: Rows whose bound was computed.

    """

    space: Space
    costs: Costs
    limit: float
    dropped: Counter[str] = field(default_factory=Counter)
    num_bounded: int = 0
    _heap: list[tuple[float, int, _Pool]] = field(default_factory=list)
    _made: int = 0

    def start(self) -> None:
        """Unfold the cells of the space."""
        cells = unfold(self.space, root(self.space), "context_parallel_type")
        self._add(Level.CELLS, cells, self._open_seconds(cells.table, schedule_is_open=True))

    def pop(self, cutoff: float) -> tuple[float, LayoutTable] | None:
        """Return the complete layout with the smallest bound, as a table of one row.

        None when nothing below the cutoff is left.
        """
        while self._heap and self._heap[0][0] < cutoff:
            _, _, pool = heapq.heappop(self._heap)
            first = pool.next_row
            stop = min(first + BLOCK[pool.level], int(np.searchsorted(pool.bound, cutoff)))
            pool.next_row = stop
            bound, rows = pool.bound[first:stop], np.arange(first, stop)
            self._push(pool)
            block = replace(pool.partial, table=pool.partial.table.take(rows))
            if pool.level is Level.COMPLETE:
                return float(bound[0]), block.table
            self._refine(pool.level, block, bound, cutoff)
        return None

    def least_bound(self) -> float:
        """Return the smallest bound of what is left; inf when nothing is."""
        return self._heap[0][0] if self._heap else inf

    def _push(self, pool: _Pool) -> None:
        if pool.next_row < len(pool.bound):
            self._made += 1
            heapq.heappush(self._heap, (pool.head(), self._made, pool))

    def _add(self, level: Level, partial: Partial, bound: Values) -> None:
        self.num_bounded += len(bound)
        order = np.argsort(bound, kind="stable")
        sorted_rows = replace(partial, table=partial.table.take(order))
        self._push(_Pool(level=level, partial=sorted_rows, bound=bound[order]))

    def _refine(self, level: Level, block: Partial, bound: Values, cutoff: float) -> None:
        """Replace a block of rows by what they unfold into, below the cutoff."""
        if level is Level.CELLS:
            below = unfold(self.space, block, "stages_per_rank")
            seconds = self._open_seconds(below.table, schedule_is_open=False)
        elif level is Level.SCHEDULES:
            below, seconds = block, np.maximum(self._tight_seconds(block.table), bound)
        else:
            below, seconds = self._complete(block, cutoff)
        self.dropped["device_memory"] += int(np.count_nonzero(np.isinf(seconds)))
        keep = np.flatnonzero(seconds < cutoff)
        if len(keep):
            kept = replace(below, table=below.table.take(keep))
            self._add(Level(level + 1), kept, np.maximum(seconds[keep], bound[0]))

    def _open_seconds(self, table: LayoutTable, *, schedule_is_open: bool) -> Values:
        nothing = np.zeros(len(table))
        if not len(table):
            return nothing
        few = nothing + 1 if schedule_is_open else self._smallest_stages(table)
        limits = SplitLimits(layers=few, recomputed=nothing, fullest=nothing)
        return self.costs.open_seconds(table, limits, schedule_is_open=schedule_is_open)

    def _tight_seconds(self, table: LayoutTable) -> Values:
        """Bound partial layouts by what fits under the leanest states; inf where nothing does.

        Nothing that fits is lost: of all states that the axes allow, the one that asks for the
        least recomputation, and the one that lets the layers lie most evenly, are taken.
        """
        codes = set(self.space.axes.named("recompute").values[:, 0].tolist())
        few = self._smallest_stages(table)
        full, other, fullest = (np.full(len(table), inf) for _ in range(3))
        most = np.full(len(table), float(self.space.model.num_layers) if FULL in codes else 0.0)
        for lean in self._leanest_states(table):
            full = np.minimum(full, self.costs.least_recomputed(lean, few, self.limit))
            fullest = np.minimum(fullest, self.costs.fullest_stage(lean, most, self.limit))
            for code in codes - {FULL}:
                kept = replace(lean, recompute=_filled(table, code))
                held = self.costs.memory_bound(kept, few)
                other = np.minimum(other, np.where(held <= self.limit, 0.0, inf))
        redone = np.minimum(np.maximum(full, 1.0) if FULL in codes else inf, other)
        never = np.isinf(redone) | np.isinf(fullest)
        limits = SplitLimits(
            layers=few,
            recomputed=np.where(never, 0, redone),
            fullest=np.where(never, 1, fullest),
        )
        seconds = self.costs.open_seconds(table, limits, schedule_is_open=False)
        return np.where(never, inf, seconds)

    def _leanest_states(self, table: LayoutTable) -> list[LayoutTable]:
        """Return the table under every ZeRO stage and offload, states cut over all ranks."""
        stages = self.space.axes.named("zero_stage").values[:, 0].tolist()
        offloads = self.space.axes.named("offload").values.tolist()
        whole = table.data_parallel * table.context_parallel
        return [
            replace(
                table,
                zero_stage=_filled(table, stage),
                zero_group=whole,
                offload_optimizer=_filled(table, optimizer),
                offload_parameters=_filled(table, parameters),
                offload_activations=_filled(table, activations),
            )
            for stage, (optimizer, parameters, activations) in product(stages, offloads)
            if not parameters or stage == CUTS_PARAMETERS
        ]

    def _complete(self, block: Partial, cutoff: float) -> tuple[Partial, Values]:
        """Unfold what is left, and return complete layouts that may fit with their bounds.

        Memory does not depend on the rank order, so that axis unfolds after it is known.
        """
        below = unfold(self.space, block, "offload")
        few = self._smallest_stages(below.table)
        fits = np.flatnonzero(self.costs.memory_bound(below.table, few) <= self.limit)
        self.dropped["device_memory"] += len(below.table) - len(fits)
        below, few = replace(below, table=below.table.take(fits)), few[fits]
        redone = self._redone(below.table, few)
        orders, parents = unfold_with_parents(self.space, below, "rank_order")
        few, redone = few[parents], redone[parents]
        if not len(orders.table):
            return orders, np.zeros(0)
        is_full = orders.table.recompute == FULL
        most = np.where(is_full, float(self.space.model.num_layers), 0.0)
        seconds = self._seconds(orders.table, few, redone, most)
        splits = (
            is_full & (orders.table.pipeline_parallel > 1) & (orders.table.stages_per_rank == 1)
        )
        open_rows = np.flatnonzero((seconds < cutoff) & splits)
        if len(open_rows):
            seconds[open_rows] = self._recomputing_seconds(
                orders.table.take(open_rows), few[open_rows], redone[open_rows]
            )
        return orders, seconds

    def _redone(self, table: LayoutTable, few: Values) -> Values:
        """Return layers per stage that full recomputation redoes at least; inf: nothing fits."""
        redone = np.ones(len(table))
        full = np.flatnonzero(table.recompute == FULL)
        if len(full):
            needed = self.costs.least_recomputed(table.take(full), few[full], self.limit)
            redone[full] = np.maximum(needed, 1.0)
        return redone

    def _recomputing_seconds(self, table: LayoutTable, few: Values, least: Values) -> Values:
        """Return the bound under full recomputation, over ranges of how many layers are redone.

        Within a range the fewest give the time and the most give the room. More than lets the
        layers lie evenly is never faster than that.
        """
        bound = np.full(len(table), inf)
        even = np.ceil(self.space.model.num_layers / table.pipeline_parallel)
        is_open = np.ones(len(table), dtype=np.bool_)
        first = 1
        while first <= self.space.model.num_layers:
            last = first + first // RANGE
            rows = np.flatnonzero(is_open & (least <= last))
            if len(rows):
                redone = np.maximum(least[rows], first)
                some = table.take(rows)
                fullest = self.costs.fullest_stage(
                    some, np.full(len(rows), float(last)), self.limit
                )
                below = self._seconds_within(some, few[rows], redone, fullest)
                bound[rows] = np.minimum(bound[rows], below)
                is_open[rows] = fullest > even[rows]
            first = last + 1
        return bound

    def _seconds(
        self, table: LayoutTable, few: Values, redone: Values, most_redone: Values
    ) -> Values:
        fullest = self.costs.fullest_stage(table, most_redone, self.limit)
        return self._seconds_within(table, few, redone, fullest)

    def _seconds_within(
        self, table: LayoutTable, few: Values, redone: Values, fullest: Values
    ) -> Values:
        never = np.isinf(redone) | np.isinf(fullest)
        limits = SplitLimits(
            layers=few,
            recomputed=np.where(never, 1, redone),
            fullest=np.where(never, 1, fullest),
        )
        return np.where(never, inf, self.costs.seconds_bound(table, limits))

    def _smallest_stages(self, table: LayoutTable) -> Values:
        """Return the layers that each stage of every considered split has."""
        layers = self.space.model.num_layers
        pairs = np.stack([table.pipeline_parallel, table.stages_per_rank])
        unique, of_row = np.unique(pairs, axis=1, return_inverse=True)
        smallest = [smallest_stage(layers, int(p), int(v)) for p, v in unique.T]
        return np.array(smallest, dtype=np.float64)[of_row.ravel()]


def _filled(table: LayoutTable, value: int) -> IntColumn:
    return np.full(len(table), value, dtype=np.int64)
