"""Looped schedules: gpipe, 1f1b, interleaved-1f1b, zero-bubble; rank r holds every pp-th stage.

All four are one pattern. A rank runs its forwards f_0, f_1, ... and its backwards b_0, b_1, ... in
fixed orders; after `warmup` forwards it alternates, and weight gradients follow their input
gradients `delay` places later:

    f_0 .. f_{warmup-1} | f_{warmup+j}  b_j  w_{j-delay}   for j = 0, 1, ...

    schedule          warmup on rank r                    b    delay
    gpipe             m                                   B    -
    1f1b              pp - 1 - r                          B    -
    interleaved-1f1b  (v - 1) * round + 2 (pp - 1 - r)    B    -
    zero-bubble       (v - 1) * round + (pp - 1 - r)      I    r

The orders go through a rank's v stages in rounds: `round` micro-batches on its first stage, the
same ones on the next, and so on (backwards from the last). Round is pp where pp divides m; torch's
generalisation spreads m evenly over max(1, m // pp) rounds.

Sources: GPipe, Huang et al., NeurIPS 2019; 1F1B and interleaving, Narayanan et al., SC 2021,
section 2.2; ZB-H1, Qi et al., ICLR 2024, section 2.1 (its rule: r weight gradients are put off on
rank r, so that each rank holds what rank 0 of 1F1B holds).
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from costmodels.layout import Schedule
from costmodels.schedule.action import ActionKind
from costmodels.schedule.shape import PipelineShape
from costmodels.schedule.table import Row, encode

Codes = NDArray[np.int64]


def looped_row(shape: PipelineShape, rank: int) -> Row:
    """Return the row of one rank under gpipe, 1f1b, interleaved-1f1b or zero-bubble."""
    count = shape.stages_per_rank * shape.num_micro_batches
    warmup = min(_WARMUP[shape.schedule](shape, rank), count)
    forwards = _in_rounds(shape, ActionKind.FORWARD, rank)
    if shape.schedule is Schedule.ZERO_BUBBLE:
        inputs = _in_rounds(shape, ActionKind.BACKWARD_INPUT, rank)
        weights = _in_rounds(shape, ActionKind.BACKWARD_WEIGHT, rank)
        steady = interleave((forwards[warmup:], 0), (inputs, 0), (weights, rank))
    else:
        backwards = _in_rounds(shape, ActionKind.BACKWARD, rank)
        steady = interleave((forwards[warmup:], 0), (backwards, 0))
    return tuple(np.concatenate([forwards[:warmup], steady]).tolist())


def interleave(*columns: tuple[Codes, int]) -> Codes:
    """Deal columns out in turn: first of each, second of each, ...; short columns drop out.

    Args:
        columns: Codes, and the number of turns for which they wait.

    """
    turns = max(delay + len(codes) for codes, delay in columns)
    dealt = np.full((turns, len(columns)), -1, dtype=np.int64)
    for i, (codes, delay) in enumerate(columns):
        dealt[delay : delay + len(codes), i] = codes
    flat = dealt.ravel()
    return flat[flat >= 0]


def _in_rounds(shape: PipelineShape, kind: ActionKind, rank: int) -> Codes:
    """Return all actions of a kind on a rank, round by round, in the order they are started."""
    size, stages = shape.micro_batches_per_round, shape.stages_per_rank
    rounds, turn, place = np.indices((shape.num_micro_batches // size, stages, size))
    local_stage = turn if kind is ActionKind.FORWARD else stages - 1 - turn
    stage = local_stage * shape.pipeline_parallel + rank
    codes = encode(shape, kind, 0) + stage * shape.num_micro_batches + rounds * size + place
    flat: Codes = codes.ravel()
    return flat


def _gpipe_warmup(shape: PipelineShape, rank: int) -> int:  # noqa: ARG001 - one signature for all
    return shape.num_micro_batches


def _one_f_one_b_warmup(shape: PipelineShape, rank: int) -> int:
    return shape.pipeline_parallel - 1 - rank


def _interleaved_warmup(shape: PipelineShape, rank: int) -> int:
    first = (shape.stages_per_rank - 1) * shape.micro_batches_per_round
    return first + 2 * (shape.pipeline_parallel - 1 - rank)


def _zero_bubble_warmup(shape: PipelineShape, rank: int) -> int:
    first = (shape.stages_per_rank - 1) * shape.micro_batches_per_round
    return first + shape.pipeline_parallel - 1 - rank


_WARMUP: dict[Schedule, Callable[[PipelineShape, int], int]] = {
    Schedule.GPIPE: _gpipe_warmup,
    Schedule.ONE_F_ONE_B: _one_f_one_b_warmup,
    Schedule.INTERLEAVED: _interleaved_warmup,
    Schedule.ZERO_BUBBLE: _zero_bubble_warmup,
}
