"""The bound that CP-SAT would prove for the splits of many layouts at once.

With one stage per rank, a rank r with n layers of the main kind scores (see `schedule/bound.py`)

    gpipe, 1f1b    way + n (a W - b_r F) + ends_r + m R min(k, n)     way = T + 2 c
    zero-bubble    the same with                                      way = sum of all F

W and F are seconds of a layer (F its forward), R what recomputing it adds, m micro-batches; a = m -
1, b_r = 0 (gpipe) or min(m, p - r) - 1 (1f1b), or a = m and b_r = min(m, p - r) (zero-bubble). A
score S leaves each rank room for so many whole layers, and memory for no more than `StageRooms`
says. Where these do not sum to all layers, no split scores S. Halving finds the largest such S.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodels.bounds import around_rows
from costmodels.hardware import Cluster
from costmodels.job import TrainingJob
from costmodels.layout import Schedule
from costmodels.layout_costs import LayoutCosts, layout_costs
from costmodels.layout_table import SCHEDULES, LayoutTable
from costmodels.model import ModelSpec
from costmodels.pipeline_bound import block_totals, main_kind
from costmodels.stage_room import RoomGroup, StageRooms, stage_rooms

Values = NDArray[np.float64]

HALVINGS = 12  # chosen: a bound within 1/4000 of the interval that it was known to
_SLACK = 1e-9
_GPIPE = SCHEDULES.index(Schedule.GPIPE)
_ZERO_BUBBLE = SCHEDULES.index(Schedule.ZERO_BUBBLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scores:
    """What the ranks of a group score: [rows, ranks], or [rows, 1] where ranks do not differ."""

    layer: Values
    fixed: Values
    redone: Values

    def layers_within(self, score: Values, recomputed: Values) -> Values:
        """Return whole layers that a rank may hold without scoring more."""
        left = score[:, None] - self.fixed
        k = recomputed[:, None]
        layer = np.maximum(self.layer, 1e-12)
        some = (left - k * self.redone) / layer
        every = left / (layer + self.redone)
        within: Values = np.floor(np.maximum(np.where(some >= k, some, every), 0.0) + _SLACK)
        return within


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    """One group's question: do all layers find room at a score?"""

    scores: _Scores
    room: Values
    recomputed: Values
    num_layers: int

    def fits(self) -> NDArray[np.bool_]:
        """Whether memory has room for all layers."""
        return np.asarray(self.room.sum(axis=1) >= self.num_layers)

    def holds(self, score: Values) -> NDArray[np.bool_]:
        """Whether ranks hold all layers without scoring more."""
        within = np.minimum(self.scores.layers_within(score, self.recomputed), self.room)
        return np.asarray(within.sum(axis=1) >= self.num_layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitBound:
    """Bounds over the splits of a table's layouts under one memory limit.

    Attributes:
        once: Seconds per step besides the pipeline, at their least, one entry per layout.
        stretch: Factor on everything.

    """

    rooms: StageRooms
    scores: tuple[_Scores, ...]
    once: Values
    stretch: float

    def fullest(self, most_recomputed: Values) -> Values:
        """See `StageRooms.fullest`."""
        return self.rooms.fullest(most_recomputed)

    def seconds(
        self, least_recomputed: Values, most_recomputed: Values, below: Values, above: float
    ) -> Values:
        """Return seconds that no split which fits goes below.

        Args:
            least_recomputed: Layers that each stage recomputes in full, at least.
            most_recomputed: The same, at most.
            below: A bound that is known already; it is raised.
            above: Seconds above which a layout is of no interest; those get inf.

        """
        bound = below.copy()
        for group, scores in zip(self.rooms.groups, self.scores, strict=True):
            rows = group.rows
            level = _Level(
                scores=scores,
                room=group.room(most_recomputed[rows]),
                recomputed=least_recomputed[rows],
                num_layers=self.rooms.num_layers,
            )
            bound[rows] = self._raised(level, rows, below[rows], above)
        return bound

    def _raised(
        self, level: _Level, rows: NDArray[np.int64], below: Values, above: float
    ) -> Values:
        """Halve the interval between a known bound and what is of interest."""

        def holds(seconds: Values) -> NDArray[np.bool_]:
            return level.holds(seconds / self.stretch - self.once[rows])

        low, high = below, np.minimum(above, 4 * below)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            enough = holds(middle)
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        never = ~level.fits()
        if np.isfinite(above):
            never |= ~holds(np.full(len(rows), above))
        return np.where(never, np.inf, low)


def split_bound(
    model: ModelSpec, job: TrainingJob, cluster: Cluster, table: LayoutTable, *, limit: float
) -> SplitBound:
    """Return the bounds of a table's splits.

    Args:
        model: The network.
        job: What is trained per step.
        cluster: The machine.
        table: Layouts that the rules allow, at least one.
        limit: Bytes that a rank may reserve.

    """
    rooms = stage_rooms(model, job, cluster, table, limit=limit)
    costs = layout_costs(model, job, cluster, table)
    once, stretch = around_rows(model, job, cluster, table, costs)
    return SplitBound(
        rooms=rooms,
        scores=tuple(_scores(model, costs, table, group) for group in rooms.groups),
        once=once,
        stretch=stretch,
    )


def _scores(model: ModelSpec, costs: LayoutCosts, table: LayoutTable, group: RoomGroup) -> _Scores:
    """Return what the ranks of a group score."""
    rows = group.rows
    counts = {kind: model.layer_kinds.count(kind) for kind, _ in costs.layers}
    main, totals = main_kind(costs, counts, table), block_totals(costs, counts)
    pipeline = int(table.pipeline_parallel[rows[0]])
    m = table.num_micro_batches[rows].astype(np.float64)[:, None]
    ahead = np.minimum(m, pipeline - np.arange(pipeline)[None, :])
    schedule = table.schedule[rows][:, None]
    is_zero_bubble, is_gpipe = schedule == _ZERO_BUBBLE, schedule == _GPIPE
    times = np.where(is_zero_bubble, m, m - 1)
    spared = np.where(is_gpipe, 0.0, np.where(is_zero_bubble, ahead, ahead - 1))

    def score(total: Values, forward: Values) -> Values:
        of_rank: Values = times * total[rows][:, None] - spared * forward[rows][:, None]
        return of_rank

    every = totals.forward + totals.backward_input + totals.backward_weight
    way = every[rows] + 2 * costs.hops.way[rows]
    fixed = np.where(is_zero_bubble, totals.forward[rows][:, None], way[:, None])
    fixed = np.repeat(fixed, pipeline, axis=1)
    fixed[:, 0] += score(costs.embedding.total, costs.embedding.forward)[:, 0]
    fixed[:, -1] += score(costs.head.total, costs.head.forward)[:, -1]
    # A layer of the other kind in place of a recomputed one brings its own work along.
    other = np.minimum(main.again, main.other_again + np.minimum(main.other, 1e9))
    return _Scores(
        layer=score(main.total, main.forward), fixed=fixed, redone=m * other[rows][:, None]
    )
