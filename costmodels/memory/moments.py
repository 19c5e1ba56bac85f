"""Moments at which a pipeline rank may be fullest: how many micro-batches wait in its stages.

A micro-batch waits from its forward to its input gradient, and where backwards are split from there
to its weight gradient. It is counted by which of the two it waits for, because what it keeps
differs: a recomputed layer keeps its input until the first, and all that came back until the other.
"""

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from costmodels.layout import Layout, Schedule
from costmodels.schedule import held_moments


class Moment(NamedTuple):
    """Micro-batches that wait in each of a rank's stages, in model order.

    Attributes:
        until_input: Between F and B or I.
        put_off: Between I and W.
        before_b: A backward pass that gives both gradients comes next.
        before_i: One that gives the input's gradient alone does.

    """

    until_input: tuple[int, ...]
    put_off: tuple[int, ...]
    before_b: bool
    before_i: bool

    @property
    def in_flight(self) -> int:
        """Return how many wait in all stages together."""
        return sum(self.until_input) + sum(self.put_off)


Moments = tuple[Moment, ...]


def rank_moments(layout: Layout) -> tuple[Moments, ...]:
    """Return, per pipeline rank, the moments that may be its fullest; most in flight come first.

    Left out are moments that another one exceeds: no stage waits more, for either gradient.
    """
    return _moments_of_shape(*_shape_of(layout))


def covered_by_the_one_before(layout: Layout) -> tuple[bool, ...]:
    """Tell, per pipeline rank, whether the one before holds as much or more at some moment each."""
    return _covered_ranks(*_shape_of(layout))


def _shape_of(layout: Layout) -> tuple[Schedule, int, int, int]:
    return (
        layout.schedule,
        layout.pipeline_parallel,
        layout.stages_per_rank,
        layout.num_micro_batches,
    )


@lru_cache(maxsize=1024)
def _moments_of_shape(
    schedule: Schedule, pipeline_parallel: int, stages_per_rank: int, num_micro_batches: int
) -> tuple[Moments, ...]:
    """Layouts of one shape share their moments, and a search asks for many of a shape."""
    count = stages_per_rank
    ranks = held_moments(schedule, pipeline_parallel, stages_per_rank, num_micro_batches)
    return tuple(
        tuple(
            Moment(tuple(row[:count]), tuple(row[count:-2]), *map(bool, row[-2:]))
            for row in _maximal(
                np.hstack([held.until_input, held.put_off, held.before_b, held.before_i])
            ).tolist()
        )
        for held in ranks
    )


def _maximal(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rows that no other row exceeds everywhere."""
    kept = np.empty_like(rows)
    number = 0
    for row in rows[np.argsort(-rows.sum(axis=1), kind="stable")]:
        if not (row <= kept[:number]).all(axis=1).any():
            kept[number] = row
            number += 1
    return kept[:number]


@lru_cache(maxsize=1024)
def _covered_ranks(
    schedule: Schedule, pipeline_parallel: int, stages_per_rank: int, num_micro_batches: int
) -> tuple[bool, ...]:
    moments = _moments_of_shape(schedule, pipeline_parallel, stages_per_rank, num_micro_batches)
    rows = [np.array([(*a, *b, *next_one) for a, b, *next_one in of_rank]) for of_rank in moments]

    def covers(before: NDArray[np.int64], mine: NDArray[np.int64]) -> bool:
        is_less = np.all(mine[:, None] <= before, axis=2)
        return bool(np.all(np.any(is_less, axis=1)))

    return (False, *(covers(before, mine) for before, mine in pairwise(rows)))
