"""Bounds of the frontier's rows: what no completion, or no considered split, of a row goes below.

open      degrees alone, then with the schedule; nothing gathered, recomputed or reduced
tight     the same, with what must be recomputed and how unevenly layers must lie to fit under
          the leanest states that the axes allow
complete  every choice made: memory first, then time with the fewest layers that must be
          recomputed and the fullest rank that memory leaves
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf

import numpy as np

from costmodels.bounds.pipeline import SplitLimits, no_limits
from costmodels.layout import Recompute
from costmodels.layout_table import RECOMPUTES, IntColumn, LayoutTable
from planner.rules.rule import CUTS_PARAMETERS
from planner.search.costs import Costs, Values
from planner.search.priced import PricedTable
from planner.search.references import References
from planner.search.space import Partial, Space, unfold, unfold_with_parents
from planner.search.split_limits import split_limits

NONE, SELECTIVE, FULL = map(RECOMPUTES.index, (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL))
RANGE = 4  # chosen: recomputed layers are bounded in ranges a quarter wide


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBounds:
    """Bounds under a memory limit.

    Attributes:
        limit: Bytes that a rank may reserve.
        references: Pipelines that were simulated; they grow.
        known_splits: False where the user states the split.
        dropped: Complete rows that a memory bound excluded, by rule; it grows.

    """

    space: Space
    costs: Costs
    limit: float
    references: References
    known_splits: bool = True
    dropped: Counter[str] = field(default_factory=Counter)

    def open_seconds(self, table: LayoutTable, *, schedule_is_open: bool) -> Values:
        """Bound partial layouts, whatever memory says."""
        if not len(table):
            return np.zeros(0)
        nothing = np.zeros(len(table))
        if schedule_is_open:
            limits = replace(no_limits(table), recomputed=nothing, fullest=nothing, redone=nothing)
        else:
            limits = self._limits(table, nothing, nothing)
        return self.costs.open_seconds(table, limits, schedule_is_open=schedule_is_open)

    def tight_seconds(self, table: LayoutTable) -> Values:
        """Bound partial layouts by what fits under the leanest states; inf where nothing does.

        Nothing that fits is lost: of all states that the axes allow, the one that asks for the
        least recomputation, and the one that lets the layers lie most evenly, are taken.
        """
        codes = set(self.space.axes.named("recompute").values[:, 0].tolist())
        most = float(self.space.model.num_layers) if FULL in codes else 0.0
        lean = self._leanest_states(table)
        redone, fullest = np.full(len(lean), inf), np.full(len(lean), inf)
        held = self.costs.memory_bound(lean, any_recompute=True, limit=self.limit)
        may = np.flatnonzero(held <= self.limit)
        if len(may):
            redone[may] = self._least_redone(lean.take(may), codes)
        fits = np.flatnonzero(np.isfinite(redone))
        if len(fits):
            some = lean.take(fits)
            if SELECTIVE in codes:  # it keeps less than none, and asks for no layer as full does
                some = replace(some, recompute=_filled(some, SELECTIVE))
            rooms = self.costs.rooms(some, self.limit)
            fullest[fits] = rooms.fullest(np.full(len(fits), most))
        redone, fullest = (
            of.reshape(-1, len(table)).min(axis=0, initial=inf) for of in (redone, fullest)
        )
        never = np.isinf(redone) | np.isinf(fullest)
        limits = self._limits(table, np.where(never, 0, redone), np.where(never, 1, fullest))
        seconds = self.costs.open_seconds(table, limits, schedule_is_open=False)
        return np.where(never, inf, seconds)

    def _least_redone(self, table: LayoutTable, codes: set[int]) -> Values:
        """Return layers per stage that full recomputation redoes at least, whatever the row's own.

        0 where some other recomputation of `codes` may fit, inf where nothing does.
        """
        needed = self.costs.least_recomputed(table, self.limit)
        redone = np.maximum(needed, 1.0) if FULL in codes else np.full(len(table), inf)
        if NONE in codes:
            redone = np.where(needed == 0, 0.0, redone)
        for code in codes - {NONE, FULL}:
            rows = np.flatnonzero(redone > 0)
            if len(rows):
                some = table.take(rows)
                some = replace(some, recompute=_filled(some, code))
                held = self.costs.memory_bound(some, limit=self.limit)
                redone[rows] = np.where(held <= self.limit, 0.0, redone[rows])
        return redone

    def complete(self, block: Partial, cutoff: float) -> tuple[PricedTable, Values]:
        """Unfold what is left, and return complete layouts that may fit, priced, with their bounds.

        Memory does not depend on the rank order, so that axis unfolds after it is known.
        """
        below, redone = self._fitting(unfold(self.space, block, "offload"))
        orders, parents = unfold_with_parents(self.space, below, "rank_order")
        table, redone = orders.table, redone[parents]
        priced = self.costs.priced(table, redone)
        if not len(table):
            return priced, np.zeros(0)
        limits = self._limits(table, redone, np.ones(len(table)))
        seconds = self.costs.seconds_bound(priced, limits)
        splits = (table.pipeline_parallel > 1) & (table.stages_per_rank == 1)
        rows = np.flatnonzero((seconds < cutoff) & splits)
        if len(rows):
            seconds[rows] = self._split_seconds(priced.take(rows), seconds[rows], cutoff)
        return priced, seconds

    def referenced(self, priced: PricedTable, below: Values) -> Values:
        """Raise bounds of complete layouts by pipelines of their shape that were simulated."""
        if not self.known_splits:
            return below
        bound = below.copy()
        rows = np.flatnonzero(priced.table.stages_per_rank > 1)
        if len(rows):
            bound[rows] = self.references.bound(priced.take(rows), below[rows])
        return bound

    def _fitting(self, rows: Partial) -> tuple[Partial, Values]:
        """Return rows that may fit, and layers per stage that are recomputed in full, at least."""
        redone, full = np.zeros(len(rows.table)), rows.table.recompute == FULL
        if len(redone):
            held = self.costs.memory_bound(rows.table, limit=self.limit)
            redone[held > self.limit] = inf
        asked = np.flatnonzero(full & (redone == 0))
        if len(asked):
            needed = self.costs.least_recomputed(rows.table.take(asked), self.limit)
            redone[asked] = np.maximum(needed, 1.0)
        fits = np.flatnonzero(np.isfinite(redone))
        self.dropped["device_memory"] += len(redone) - len(fits)
        return rows.take(fits), redone[fits]

    def _split_seconds(self, priced: PricedTable, below: Values, cutoff: float) -> Values:
        """Raise the bound of layouts whose splits are free; inf where none is below the cutoff.

        Under full recomputation it is the smallest over ranges of how many layers are redone:
        within a range the fewest give the time, and the most give the room.
        """
        splits = self.costs.split_bound(priced, self.limit)
        is_full, least = priced.table.recompute == FULL, priced.least_recomputed
        nothing = np.zeros(len(is_full))
        if not is_full.any():
            return splits.seconds(nothing, nothing, below, cutoff, wanted=~is_full)
        bound = np.full(len(is_full), inf)
        last, most = -1, self.space.model.num_layers
        while last < most:
            first = last + 1
            last = first + first // RANGE
            counts = (is_full & (least <= last)) if first else ~is_full
            counts &= bound > below  # it falls no further
            if not counts.any():
                continue
            redone = np.where(is_full, np.maximum(least, first), 0.0)
            at_most = np.where(is_full, float(last), 0.0)
            raised = splits.seconds(redone, at_most, below, cutoff, wanted=counts)
            bound = np.where(counts, np.minimum(bound, raised), bound)
        return bound

    def _limits(self, table: LayoutTable, redone: Values, fullest: Values) -> SplitLimits:
        return split_limits(
            self.space.model,
            table,
            recomputed=redone,
            fullest=fullest,
            known_splits=self.known_splits,
        )

    def _leanest_states(self, table: LayoutTable) -> LayoutTable:
        """Return the table once under each of the leanest states, which are cut over all ranks.

        Of ZeRO stages and offload combinations that the axes allow, those stay that no other one
        allows less memory than in every layout: stage 1 cuts what 0 holds and moves nothing more,
        and the optimizer takes no memory where it is offloaded.
        """
        stages = set(self.space.axes.named("zero_stage").values[:, 0].tolist())
        stages -= {0} if 1 in stages else set()
        offloads = self.space.axes.named("offload").values.tolist()
        least = [parts for parts in offloads if parts[0] or [1, *parts[1:]] not in offloads]
        states = [
            (stage, *parts)
            for stage, parts in product(sorted(stages), least)
            if not parts[1] or stage == CUTS_PARAMETERS
        ]
        # There are none where what the user fixed of both excludes each other.
        each = np.array(states, dtype=np.int64).reshape(-1, 4)
        stage, optimizer, parameters, activations = np.repeat(each, len(table), axis=0).T
        every = table.take(np.tile(np.arange(len(table)), len(states)))
        return replace(
            every,
            zero_stage=stage,
            keep_gathered=np.zeros_like(stage),
            zero_group=every.data_parallel * every.context_parallel,
            offload_optimizer=optimizer,
            offload_parameters=parameters,
            offload_activations=activations,
        )


def _filled(table: LayoutTable, value: int) -> IntColumn:
    return np.full(len(table), value, dtype=np.int64)
