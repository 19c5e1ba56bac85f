"""Micro-batches in flight: what each rank holds at which moments, from its row alone.

A stage holds a micro-batch's activations from its forward to its backward. Split backwards let go
in two steps: the part that only the input gradient needs goes with I, the part that the weight
gradient needs (inputs and output gradients of its matrix products) goes with W. When things happen
does not matter, only the order within a row, so no durations are needed.

Closed forms of the largest count on rank r, in stages x micro-batches, up to W (v stages per rank,
rounds of R micro-batches; never more than v * m):

    gpipe             m
    1f1b              pp - r
    interleaved-1f1b  (v - 1) R + 2 (pp - 1 - r) + 1
    zero-bubble       (v - 1) R + pp           the same on every rank
    zbv               min(2 pp, m + 1 + r)     half-stages; 2 pp is what rank 0 of 1f1b holds
    dualpipev         2 pp + 1

Sources: those of the generators; the forms are checked against the tables for every small shape.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from costmodels.layout import Schedule
from costmodels.layout_table import SCHEDULES, distinct
from costmodels.schedule.action import BACKWARD_CODE, FORWARD_CODE, INPUT_CODE, WEIGHT_CODE
from costmodels.schedule.build import table_of_shape
from costmodels.schedule.shape import Ints, PipelineShape


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMoments:
    """What one rank holds at every distinct moment of a step.

    Each row of the arrays is a moment, each column one of the rank's stages in model order.

    Attributes:
        stages: Global stages of the columns.
        until_input: Micro-batches between their F and their B or I.
        until_weight: Micro-batches between their F and their B or W; never fewer.
        before_b: Whether a B comes next; one column.
        before_i: Whether an I does.

    """

    stages: tuple[int, ...]
    until_input: NDArray[np.int64]
    until_weight: NDArray[np.int64]
    before_b: NDArray[np.bool_]
    before_i: NDArray[np.bool_]

    @property
    def put_off(self) -> NDArray[np.int64]:
        """Micro-batches between their I and their W."""
        return self.until_weight - self.until_input

    def peak(self, until_input: NDArray[np.float64], until_weight: NDArray[np.float64]) -> float:
        """Return the most that is held at once.

        Args:
            until_input: Per stage of the rank, what one micro-batch lets go of with I.
            until_weight: Per stage of the rank, what it lets go of with W. A B lets go of both.

        """
        return float((self.until_input @ until_input + self.until_weight @ until_weight).max())


def held_moments(
    schedule: Schedule, pipeline_parallel: int, stages_per_rank: int, num_micro_batches: int
) -> tuple[HeldMoments, ...]:
    """Return the moments of each rank, exact for every number of micro-batches.

    The moments of a long step are those of a short one: once a schedule is steady it only repeats
    (`PipelineShape.shortened`).

    Raises:
        ValueError: The schedule does not admit these sizes.

    """
    return _moments(
        PipelineShape(
            schedule=Schedule(schedule),
            pipeline_parallel=pipeline_parallel,
            stages_per_rank=stages_per_rank,
            num_micro_batches=num_micro_batches,
        ).shortened(6)
    )


def in_flight(
    schedule: Schedule, pipeline_parallel: int, stages_per_rank: int, num_micro_batches: int
) -> tuple[int, ...]:
    """Return the most micro-batches held at once by each rank, summed over its stages, up to W.

    Raises:
        ValueError: The schedule does not admit these sizes.

    """
    moments = held_moments(schedule, pipeline_parallel, stages_per_rank, num_micro_batches)
    return tuple(int(held.until_weight.sum(axis=1).max()) for held in moments)


def in_flight_closed_form(
    schedule: Ints,
    pipeline_parallel: Ints,
    stages_per_rank: Ints,
    num_micro_batches: Ints,
    rank: Ints,
) -> Ints:
    """Return `in_flight` of one rank for many shapes at once, by the closed forms.

    Args:
        schedule: Positions in `costmodels.layout_table.SCHEDULES`; all arrays broadcast.
        pipeline_parallel: Pipeline ranks.
        stages_per_rank: Stages on each rank.
        num_micro_batches: Micro-batches of a step.
        rank: Pipeline rank.

    """
    pp, v, m = pipeline_parallel, stages_per_rank, num_micro_batches
    rounds = np.where(v > 1, m // np.maximum(1, m // pp), 0)
    ahead = (v - 1) * rounds
    forms = {
        Schedule.GPIPE: m,
        Schedule.ONE_F_ONE_B: pp - rank,
        Schedule.INTERLEAVED: ahead + 2 * (pp - 1 - rank) + 1,
        Schedule.ZERO_BUBBLE: ahead + pp,
        Schedule.ZBV: np.minimum(2 * pp, m + 1 + rank),
        Schedule.DUALPIPEV: 2 * pp + 1,
    }
    uncapped = np.select([schedule == SCHEDULES.index(s) for s in forms], list(forms.values()))
    held: Ints = np.minimum(uncapped, v * m)
    return held


@lru_cache(maxsize=1024)
def _moments(shape: PipelineShape) -> tuple[HeldMoments, ...]:
    table = table_of_shape(shape)
    return tuple(
        _moments_of_row(
            np.asarray(row), shape, tuple(s for s, r in enumerate(shape.rank_of_stage) if r == rank)
        )
        for rank, row in enumerate(table.rows)
    )


def _moments_of_row(
    row: NDArray[np.int64], shape: PipelineShape, stages: tuple[int, ...]
) -> HeldMoments:
    kind, stage = np.divmod(row // shape.num_micro_batches, shape.num_stages)
    mine = stage[:, None] == np.asarray(stages)
    starts = mine & (kind == FORWARD_CODE)[:, None]
    lets_input_go = mine & np.isin(kind, (BACKWARD_CODE, INPUT_CODE))[:, None]
    lets_weight_go = mine & np.isin(kind, (BACKWARD_CODE, WEIGHT_CODE))[:, None]
    held = np.concatenate(
        [
            np.cumsum(starts.astype(np.int64) - lets_input_go, axis=0),
            np.cumsum(starts.astype(np.int64) - lets_weight_go, axis=0),
            np.append(kind[1:] == BACKWARD_CODE, False)[:, None],
            np.append(kind[1:] == INPUT_CODE, False)[:, None],
        ],
        axis=1,
    )
    rows = distinct(held)
    count = len(stages)
    return HeldMoments(
        stages=stages,
        until_input=rows[:, :count],
        until_weight=rows[:, count:-2],
        before_b=rows[:, -2:-1] > 0,
        before_i=rows[:, -1:] > 0,
    )
