"""The bound of pipelines whose transfers take longer than their stages."""

import numpy as np
import pytest

from costmodels.layout import Schedule
from costmodels.layout_table import SCHEDULES
from costmodels.schedule import (
    PipelineSums,
    StageDurations,
    build_schedule,
    makespan_lower_bound,
    simulate,
)

TRANSFER = 10.0


def bound_of(schedule, ranks, chunks, micro_batches):
    """Bound stages whose forward and both halves of backward take a second each."""
    stages = float(ranks * chunks)
    one, way = np.array(1.0), np.array(TRANSFER * (ranks - 1))
    sums = PipelineSums(
        forward=stages * one,
        backward_input=stages * one,
        backward_weight=stages * one,
        slowest_rank=3 * chunks * one,
        forward_share=one / 3,
        smallest_forward=one,
        smallest_backward=2 * one,
        way=way,
        way_ahead=way / 2,
        way_round=np.array(TRANSFER),
    )
    shape = (SCHEDULES.index(schedule), ranks, chunks, micro_batches)
    return float(makespan_lower_bound(*map(np.array, shape), sums))


def makespan_of(schedule, ranks, chunks, micro_batches):
    second = (1.0,) * (ranks * chunks)
    durations = StageDurations(forward=second, backward_input=second, backward_weight=second)
    table = build_schedule(schedule, ranks, chunks, micro_batches)
    return simulate(table, durations, TRANSFER).makespan


def test_two_micro_batches_in_flight_return_before_the_next_two_leave():
    """Three pairs go there and back: 2 s forward, 2 s of I, 2 s of W, 20 s of transfers.

    The next one waits for no weight gradient where these are put off.
    """
    assert bound_of(Schedule.ONE_F_ONE_B, 2, 1, 6) == 3 * (2 + 4 + 20)
    assert bound_of(Schedule.ZERO_BUBBLE, 2, 1, 6) == 3 * (2 + 2 + 20)


@pytest.mark.parametrize(
    ("schedule", "chunks", "least"),
    [
        (Schedule.ONE_F_ONE_B, 1, 0.8),
        (Schedule.ZERO_BUBBLE, 1, 0.8),
        (Schedule.INTERLEAVED, 2, 0.55),
        (Schedule.INTERLEAVED, 4, 0.75),
        (Schedule.ZERO_BUBBLE, 2, 0.45),
        (Schedule.ZERO_BUBBLE, 4, 0.5),
        (Schedule.ZBV, 2, 0.4),
        (Schedule.DUALPIPEV, 2, 0.4),
    ],
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_bound_follows_the_transfers_and_stays_below_the_simulation(schedule, chunks, least, ranks):
    makespan = makespan_of(schedule, ranks, chunks, 32)
    bound = bound_of(schedule, ranks, chunks, 32)
    assert least * makespan <= bound <= makespan
