"""V-shaped schedules: zbv and dualpipev; rank r holds stages r ("down") and 2 pp - 1 - r ("up").

The last rank holds the turn of the V, the first rank both ends, so the loss stands where the
input stands and every rank's memory is the same: 2 pp half-stages of activations for zbv (what
1F1B's first rank holds), 2 pp + 1 for dualpipev.

Letters below: F forward, I input gradient, W weight gradient, B whole backward; 0 the down stage, 1
the up stage; r the rank; m micro-batches.

zbv (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 6; phases as in PyTorch):

    warm-up    2 (pp - r) - 1 of F0; r of (F1 F0); pp - r of (F1 I1 W1)
    steady     m - pp of (F0 I0 W0 F1 I1 W1), F0 while there is one
    cool-down  r of (I0 I1); pp - r of (I0 W0); what is left of W1, then of W0

With fewer than 2 pp - 1 micro-batches the table is that of 2 pp - 1 without the missing ones.

dualpipev (DeepSeek, https://github.com/deepseek-ai/DualPipe, the cut-in-half DualPipe of
arXiv:2412.19437; phases as in PyTorch): see `dualpipev_row`.
"""

from collections import deque

import numpy as np

from costmodels.schedule.action import ActionKind
from costmodels.schedule.looped import Codes, interleave
from costmodels.schedule.shape import PipelineShape
from costmodels.schedule.table import Row, encode

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT  # noqa: E741 - torch's letter
DOWN, UP = 0, 1


def zbv_row(shape: PipelineShape, rank: int) -> Row:
    """Return the row of one rank under ZB-V."""
    pp, m = shape.pipeline_parallel, shape.num_micro_batches
    full = max(m, 2 * pp - 1)
    stages = (rank, shape.num_stages - 1 - rank)

    def run(kind: ActionKind, side: int, first: int, last: int) -> Codes:
        # Micro-batches from m on only pad short steps to a full table; they leave no codes.
        codes = encode(shape, kind, stages[side]) + np.arange(first, last)
        return np.where(np.arange(first, last) < m, codes, -1)

    early, ahead, rest = 2 * (pp - rank) - 1, 2 * pp - rank - 1, full - pp
    parts = (
        run(F, DOWN, 0, early),
        interleave((run(F, UP, 0, rank), 0), (run(F, DOWN, early, ahead), 0)),
        interleave(
            *(
                (run(kind, UP, start, start + pp - rank), 0)
                for kind, start in ((F, rank), (I, 0), (W, 0))
            )
        ),
        interleave(
            (run(F, DOWN, ahead, full), 0),
            (run(I, DOWN, 0, rest), 0),
            (run(W, DOWN, 0, rest), 0),
            (run(F, UP, pp, full), 0),
            (run(I, UP, pp - rank, full - rank), 0),
            (run(W, UP, pp - rank, full - rank), 0),
        ),
        interleave((run(I, DOWN, rest, rest + rank), 0), (run(I, UP, full - rank, full), 0)),
        interleave((run(I, DOWN, rest + rank, full), 0), (run(W, DOWN, rest, full - rank), 0)),
        run(W, UP, full - rank, full),
        run(W, DOWN, full - rank, full),
    )
    row = np.concatenate(parts)
    return tuple(row[row >= 0].tolist())


class _Writer:
    """Appends a rank's actions, counting micro-batches per stage and pending weight gradients."""

    def __init__(self, shape: PipelineShape, rank: int) -> None:
        self.shape = shape
        self.stages = (rank, shape.num_stages - 1 - rank)
        self.codes: list[int] = []
        self.next_forward = [0, 0]
        self.next_backward = [0, 0]
        self.pending: deque[int] = deque()

    def forward(self, side: int) -> None:
        """Append the next forward of a side."""
        self.codes.append(encode(self.shape, F, self.stages[side], self.next_forward[side]))
        self.next_forward[side] += 1

    def backward(self, side: int, *, split: bool = False) -> None:
        """Append the next backward of a side; its weight half waits when it is split."""
        stage, micro_batch = self.stages[side], self.next_backward[side]
        self.codes.append(encode(self.shape, I if split else B, stage, micro_batch))
        if split:
            self.pending.append(encode(self.shape, W, stage, micro_batch))
        self.next_backward[side] += 1

    def weight(self) -> None:
        """Append the oldest weight gradient that waits, if there is one."""
        if self.pending:
            self.codes.append(self.pending.popleft())


def dualpipev_row(shape: PipelineShape, rank: int) -> Row:
    """Return the row of one rank under DualPipeV.

    Phases, by DeepSeek's numbers, with n = pp - 1 - r:

        1  2n of F0                    5  n of (B1 F1 B0)
        2  r + 1 of (F0 F1)            6  r + 1 of (B1 B0), the second half split, W pending
        3  n of (I1 W1 F1)             7  n of (W, B0 or I0)
        4  m - 2 pp + r + 1 of         8  the pending W
           (F0 B1 F1 B0)

    The pairs F0 B1 and F1 B0 of phases 4 and 5 are torch's OVERLAP_F_B: one stream of kernels in
    which each hides the other's communication. They stand here one after the other, which is the
    order in which they are started.
    """
    row = _Writer(shape, rank)
    after = shape.pipeline_parallel - 1 - rank
    for _ in range(2 * after):
        row.forward(DOWN)
    for _ in range(rank + 1):
        row.forward(DOWN)
        row.forward(UP)
    for _ in range(after):
        row.backward(UP, split=True)
        row.weight()
        row.forward(UP)
    for _ in range(shape.num_micro_batches - 2 * shape.pipeline_parallel + rank + 1):
        row.forward(DOWN)
        row.backward(UP)
        row.forward(UP)
        row.backward(DOWN)
    for _ in range(after):
        row.backward(UP)
        row.forward(UP)
        row.backward(DOWN)
    # Splitting starts in the middle of phase 6: with the up stage on odd ranks, else the down one.
    half = (rank + 1) // 2
    for i in range(rank + 1):
        row.backward(UP, split=i > half or (i == half and rank % 2 == 1))
        row.backward(DOWN, split=i >= half)
    for _ in range(after):
        row.weight()
        row.backward(DOWN, split=True)
    while row.pending:
        row.weight()
    return tuple(row.codes)
