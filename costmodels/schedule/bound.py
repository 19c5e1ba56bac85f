"""Lower bounds of a step's pipeline time, for many shapes at once and every partition of layers.

The search orders layouts by what no partition can beat, so nothing here may use the seconds of a
particular stage: only sums over all stages, which every partition shares, and limits that hold for
each. T = F + I + W are seconds of one micro-batch over all stages, w_r rank r's share of T, phi the
largest F / (F + I + W) of any rank, c the seconds of all transfers through the ranks, p ranks, m
micro-batches.

    every schedule   m max_r w_r, and ceil(m / k) (F + I + 2 v c), v stages per rank: rank 0 holds k
                     micro-batches at most, so forward i + k waits for i to come back; with W where
                     backwards are whole
    gpipe            T + (m - 1) max_r w_r + 2 c
                     both phases are flow shops of equal jobs
    1f1b             T + (m - 1 - (k_r - 1) phi) w_r + 2 c for each r, k_r = min(m, p - r)
                     rank r starts its first backward a whole round trip after its first forward,
                     has run k_r forwards by then, and all its other work is still to come; stages
                     before it run one forward before and one backward after all that
    zero-bubble      F + (m - k_r phi) w_r for each r, one stage per rank; weight gradients may end
                     the step, so nothing is sure to follow
    looped, v > 1    rank 0 starts a round of micro-batches when the one before has started its last
                     stage there, so its first one has gone v - 1 times through all ranks and round
                     again; the last round comes back besides
    interleaved      m T / p + (p - 1) / 2 (smallest stage): the mean over ranks of what stands
                     before a rank's first action, its work, and what stands after its last one
    zbv, dualpipev   the same with what stands before alone

A bound for each r holds for the partition that makes the largest of them smallest, which levels
them all: max_r (a + c_r w_r) >= a + T / sum_r (1 / c_r). The sum is taken by its integral
(1 / (a - phi j) is convex, so the midpoint rule bounds it from above).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodels.layout import Schedule
from costmodels.layout_table import SCHEDULES, is_one_of
from costmodels.schedule.in_flight import in_flight_closed_form
from costmodels.schedule.shape import IN_ROUNDS, Ints

Floats = NDArray[np.float64]

WHOLE_BACKWARDS = (Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSums:
    """What every partition of the layers has in common; arrays that broadcast, in seconds.

    Attributes:
        forward: One micro-batch's forward over all stages.
        backward_input: Its input gradients, with what they recompute.
        backward_weight: Its weight gradients.
        slowest_rank: At most the F + I + W of the slowest rank; 0 where nothing is known (the mean
            over ranks is used anyway).
        forward_share: At least F / (F + I + W) of every rank; 1 where nothing is known.
        smallest_forward: At most the forward of every stage.
        smallest_backward: At most the I + W of every stage.
        way: At most the transfers between ranks on the way from the first to the last, of any of
            their stages (a micro-batch goes that way once per stage of a rank, up or down).
        way_ahead: At most those on the way from the first to a rank, mean over the ranks.
        way_round: At most the transfer from the last rank to the first.

    """

    forward: Floats
    backward_input: Floats
    backward_weight: Floats
    slowest_rank: Floats
    forward_share: Floats
    smallest_forward: Floats
    smallest_backward: Floats
    way: Floats
    way_ahead: Floats
    way_round: Floats


def makespan_lower_bound(
    schedule: Ints,
    pipeline_parallel: Ints,
    stages_per_rank: Ints,
    num_micro_batches: Ints,
    sums: PipelineSums,
) -> Floats:
    """Return seconds that `simulate` does not go below, whatever the partition.

    Args:
        schedule: Positions in `costmodels.layout_table.SCHEDULES`; all arrays broadcast.
        pipeline_parallel: Pipeline ranks.
        stages_per_rank: Stages on each rank.
        num_micro_batches: Micro-batches of a step.
        sums: Seconds that hold for every partition.

    """
    p, m = pipeline_parallel.astype(np.float64), num_micro_batches.astype(np.float64)
    total = sums.forward + sums.backward_input + sums.backward_weight
    mean = total / p
    slowest = np.maximum(sums.slowest_rank, mean)
    round_trip = 2 * sums.way
    before = (p - 1) / 2 * sums.smallest_forward + sums.way_ahead
    after = (p - 1) / 2 * sums.smallest_backward + sums.way_ahead

    def levelled(first: Floats, ahead: Floats) -> Floats:
        """Seconds that c_r w_r reaches on some rank; c_r = first - phi min(p - 1 - r, ahead)."""
        reach = np.minimum(p, ahead + 1)
        share = np.maximum(sums.forward_share, 1e-9)
        least = np.maximum(first - share * (reach - 1), 0.0)
        low = first - share * (reach - 0.5)
        with np.errstate(divide="ignore", invalid="ignore"):
            inverse = np.log1p(share * reach / low) / share + (p - reach) / least
            level = np.where((low > 0) & (least > 0), total / inverse, 0.0)
        highest: Floats = np.maximum(level, least * slowest)
        return highest

    specific: dict[Schedule, Floats] = {
        Schedule.GPIPE: total + (m - 1) * slowest + round_trip,
        Schedule.ONE_F_ONE_B: total + levelled(m - 1, m - 1) + round_trip,
        Schedule.INTERLEAVED: m * mean + before + after,
        Schedule.ZERO_BUBBLE: np.where(
            stages_per_rank == 1,
            sums.forward + levelled(m - sums.forward_share, m - 1),
            m * mean + before,
        ),
        Schedule.ZBV: m * mean + before,
        Schedule.DUALPIPEV: m * mean + before,
    }
    of_schedule = np.select(
        [schedule == SCHEDULES.index(s) for s in specific], list(specific.values())
    )
    shape = (schedule, pipeline_parallel, stages_per_rank, num_micro_batches)
    held = in_flight_closed_form(*shape, np.zeros_like(pipeline_parallel))
    held = np.where(np.asarray(schedule) >= 0, held, num_micro_batches)  # an open one may hold all
    is_whole = is_one_of(schedule, *WHOLE_BACKWARDS)
    back = sums.backward_input + np.where(is_whole, sums.backward_weight, 0.0)
    returns = np.ceil(m / held) * (sums.forward + back + stages_per_rank * round_trip)
    is_looped = is_one_of(schedule, *IN_ROUNDS) & (stages_per_rank > 1)
    rounds = np.where(is_looped, _rounds(p, stages_per_rank, m, sums, back), 0.0)
    bound: Floats = np.maximum.reduce(
        np.broadcast_arrays(m * slowest, returns, rounds, of_schedule)
    )
    return bound


def _rounds(p: Floats, stages: Ints, m: Floats, sums: PipelineSums, back: Floats) -> Floats:
    """Return how long the rounds of a looped schedule take one after another.

    Args:
        p: Pipeline ranks.
        stages: On each rank.
        m: Micro-batches.
        sums: Seconds that hold for every partition.
        back: Of one micro-batch's way back, without transfers.

    """
    once = p * sums.smallest_forward + sums.way
    again = stages - 1
    comes_back = back + stages * sums.way + again * sums.way_round
    rounds: Floats = np.maximum(1, m // p) * again * (once + sums.way_round) + once + comes_back
    return rounds
