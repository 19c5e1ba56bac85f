"""The bound that CP-SAT would prove for the splits of many layouts at once.

With one stage per rank, a rank r with n layers of the main kind scores (see `schedule/bound.py`)

    gpipe, 1f1b    way + n (a W - b_r F) + ends_r + m R min(k, n)     way = T + 2 c
    zero-bubble    the same with                                      way = sum of all F
              or n (a W - b_r F - d_r V) + ...   with                 way = T - all V + 2 c

W and F are seconds of a layer (F its forward), R what recomputing it adds, m micro-batches; a = m -
1, b_r = 0 (gpipe) or min(m, p - r) - 1 (1f1b), or a = m and b_r = min(m, p - r) (zero-bubble). Its
second line ends with input gradients: a and b_r are those of 1f1b, V are weight gradients, and d_r
= min(m - 1, r) of them are put off (-1 on rank 0, whose last one ends the step). A score S leaves
each rank room for so many whole layers, and memory for no more than `StageRooms`
says. Where these do not sum to all layers, no split scores S. Halving finds the largest such S.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodels.bounds.pipeline import block_totals, main_kind
from costmodels.bounds.stage_room import RoomGroup, StageRooms, stage_rooms
from costmodels.bounds.time import around_rows
from costmodels.hardware import Cluster
from costmodels.job import TrainingJob
from costmodels.layout import Schedule
from costmodels.layout_table import SCHEDULES, LayoutTable
from costmodels.model import ModelSpec
from costmodels.time.layouts import BlockTimes, LayoutCosts, layout_costs

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

    def take(self, rows: NDArray[np.int64]) -> "_Level":
        """Return the question of some rows."""
        scores = self.scores
        return _Level(
            scores=_Scores(
                layer=scores.layer[rows], fixed=scores.fixed[rows], redone=scores.redone[rows]
            ),
            room=self.room[rows],
            recomputed=self.recomputed[rows],
            num_layers=self.num_layers,
        )

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

    def seconds(
        self,
        least_recomputed: Values,
        most_recomputed: Values,
        below: Values,
        above: float,
        wanted: NDArray[np.bool_],
    ) -> Values:
        """Return seconds that no split which fits goes below.

        Args:
            least_recomputed: Layers that each stage recomputes in full, at least.
            most_recomputed: The same, at most.
            below: A bound that is known already; it is raised.
            above: Seconds above which a layout is of no interest; those get inf.
            wanted: Layouts that the caller asks for; others keep what is known.

        """
        bound = below.copy()
        for group, scores in zip(self.rooms.groups, self.scores, strict=True):
            asked = np.flatnonzero(wanted[group.rows])
            if not len(asked):
                continue
            level = _Level(
                scores=scores,
                room=group.room(most_recomputed[group.rows]),
                recomputed=least_recomputed[group.rows],
                num_layers=self.rooms.num_layers,
            )
            rows = group.rows[asked]
            bound[rows] = self._raised(level.take(asked), rows, below[rows], above)
        return bound

    def _raised(
        self, level: _Level, rows: NDArray[np.int64], below: Values, above: float
    ) -> Values:
        """Halve the interval between a known bound and what is of interest."""

        def holds(level: _Level, rows: NDArray[np.int64], seconds: Values) -> NDArray[np.bool_]:
            return level.holds(seconds / self.stretch - self.once[rows])

        never = ~level.fits()
        if np.isfinite(above):
            never |= ~holds(level, rows, np.full(len(rows), above))
        bound = np.where(never, np.inf, below)
        # Most are settled by now, and the halvings are most of the work.
        some = np.flatnonzero(~(never | holds(level, rows, below)))
        if not len(some):
            return bound
        level, rows, low = level.take(some), rows[some], below[some]
        high = np.minimum(above, 4 * low)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            enough = holds(level, rows, middle)
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        bound[some] = low
        return bound


def split_bound(
    model: ModelSpec,
    job: TrainingJob,
    cluster: Cluster,
    table: LayoutTable,
    *,
    limit: float,
    costs: LayoutCosts | None = None,
) -> SplitBound:
    """Return the bounds of a table's splits.

    Args:
        model: The network.
        job: What is trained per step.
        cluster: The machine.
        table: Layouts that the rules allow, at least one.
        limit: Bytes that a rank may reserve.
        costs: Of the table's blocks, where they are known.

    """
    rooms = stage_rooms(model, job, cluster, table, limit=limit)
    if costs is None:
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
    ranks = np.arange(pipeline)[None, :]
    m = table.num_micro_batches[rows].astype(np.float64)[:, None]
    ahead = np.minimum(m, pipeline - ranks)
    schedule = table.schedule[rows][:, None]
    is_zero_bubble, is_gpipe = schedule == _ZERO_BUBBLE, schedule == _GPIPE
    forward, weight = totals.forward[rows][:, None], totals.backward_weight[rows][:, None]
    every = forward + totals.backward_input[rows][:, None] + weight
    way = every + 2 * costs.hops.way[rows][:, None]
    first = _WaysOfRanks(
        fixed=np.where(is_zero_bubble, forward, way),
        times=np.where(is_zero_bubble, m, m - 1),
        spared=np.where(is_gpipe, 0.0, np.where(is_zero_bubble, ahead, ahead - 1)),
        late=np.zeros((1, 1)),
    )
    # Rank 0 puts off no weight gradient, and its last one ends the step.
    late = np.where(ranks == 0, -1.0, np.minimum(m - 1, ranks))
    second = _WaysOfRanks(fixed=way - weight, times=m - 1, spared=ahead - 1, late=late)
    ends = (costs.embedding, costs.head)
    scores = [ways.scores(rows, main.alike, ends, pipeline) for ways in (first, second)]
    evenly = main.num_layers / pipeline
    longer = is_zero_bubble & (
        scores[1][0] + evenly * scores[1][1] > scores[0][0] + evenly * scores[0][1]
    )
    # A layer of the other kind in place of a recomputed one brings its own work along.
    other = np.minimum(main.again, main.other_again + np.minimum(main.other, 1e9))
    return _Scores(
        layer=np.where(longer, scores[1][1], scores[0][1]),
        fixed=np.where(longer, scores[1][0], scores[0][0]),
        redone=m * other[rows][:, None],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _WaysOfRanks:
    """One way through the pipeline per rank: what it counts of each block there.

    Attributes:
        fixed: Seconds whatever the split.
        times: How often a block's work counts.
        spared: Forwards that do not count.
        late: Weight gradients that do not count.

    """

    fixed: Values
    times: Values
    spared: Values
    late: Values

    def scores(
        self,
        rows: NDArray[np.int64],
        layers: tuple[BlockTimes, ...],
        ends: tuple[BlockTimes, BlockTimes],
        pipeline: int,
    ) -> tuple[Values, Values]:
        """Return what each rank scores without layers, and with one more: [rows, ranks]."""

        def of(block: BlockTimes) -> Values:
            score: Values = (
                self.times * block.total[rows][:, None]
                - self.spared * block.forward[rows][:, None]
                - self.late * block.backward_weight[rows][:, None]
            )
            return np.broadcast_to(score, (len(rows), pipeline))

        fixed = np.repeat(self.fixed, pipeline, axis=1)
        fixed[:, 0] += of(ends[0])[:, 0]
        fixed[:, -1] += of(ends[1])[:, -1]
        return fixed, np.minimum.reduce([of(layer) for layer in layers])
