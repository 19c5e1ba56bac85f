"""The causes of a step's time as terms, on the rank that is busy longest."""

import numpy as np
from numpy.typing import NDArray

from costmodels.layout import Layout, Recompute
from costmodels.terms import Term
from costmodels.time.blocks import AXIS_OF_CAUSE
from costmodels.time.stages import Pipeline, Rest, StageBlock, stage_seconds
from costmodels.time.tally import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    CAUSES,
    FORWARD,
    RECOMPUTE,
    SELECTIVE,
)

_ROUNDING = 1e-9  # chosen: differences of large sums below this share of them are no time
_COMMUNICATES = np.array([cause in AXIS_OF_CAUSE for cause in CAUSES])


def work_terms(blocks: list[StageBlock], layout: Layout) -> list[Term]:
    """Return the terms of a rank's micro-batches; local work done again is a term of its own.

    Args:
        blocks: All blocks of the rank.
        layout: For micro-batches and recomputation.

    """
    selective = layout.recompute is Recompute.SELECTIVE
    exposed, alone = (
        sum(_by_cause(block, name, selective=selective) for block in blocks)
        for name in ("exposed", "alone")
    )
    again = [_again(block, "exposed", selective=selective) for block in blocks]
    recompute = float(sum(np.where(_COMMUNICATES, 0.0, part).sum() for part in again))
    m = layout.num_micro_batches
    terms = [
        Term(
            name=cause,
            axis=AXIS_OF_CAUSE.get(cause),
            seconds=m * float(own),
            exposed_seconds=m * float(shown),
        )
        for cause, own, shown in zip(CAUSES, np.asarray(alone), np.asarray(exposed), strict=True)
    ]
    terms.append(local_term("recompute", m * recompute))
    if layout.offload:
        terms.append(_offload_term(blocks, m))
    return [*terms, _zero3_term(blocks, m)]


def _by_cause(block: StageBlock, name: str, *, selective: bool) -> NDArray[np.float64]:
    """Seconds of one micro-batch by cause; of what runs again, communication only."""
    phases = getattr(block.costs, name)[..., 0]
    once = block.count * (phases[FORWARD] + phases[BACKWARD_INPUT] + phases[BACKWARD_WEIGHT])
    again = np.where(_COMMUNICATES, _again(block, name, selective=selective), 0.0)
    total: NDArray[np.float64] = once + again
    return total


def _again(block: StageBlock, name: str, *, selective: bool) -> NDArray[np.float64]:
    """Seconds of one micro-batch that recomputation adds, by cause."""
    phases = getattr(block.costs, name)[..., 0]
    again: NDArray[np.float64] = (
        block.recomputed * phases[RECOMPUTE] + selective * block.count * phases[SELECTIVE]
    )
    return again


def _zero3_term(blocks: list[StageBlock], num_micro_batches: int) -> Term:
    """Return what gathering weights and reducing gradients per block costs."""
    seconds = exposed = 0.0
    for block in blocks:
        times = block.times
        moved = times.gathers.forward + times.gathers.backward + times.gathers.reduce
        seconds += block.count * float(moved[0])
        exposed += block.count * float(times.gather_exposed[0] + times.backward_exposed[0])
        # Recomputation hides more of it: `recompute` holds the difference.
        local = float(block.costs.total[RECOMPUTE, 0])
        exposed += block.recomputed * (float(times.recompute[0]) - local)
    return Term(
        name="zero3_gather",
        axis="dp",
        seconds=num_micro_batches * seconds,
        exposed_seconds=num_micro_batches * exposed,
    )


def _offload_term(blocks: list[StageBlock], num_micro_batches: int) -> Term:
    """Return what moving activations to the host and back costs."""
    seconds = sum(block.count * float(block.times.offload[0]) for block in blocks)
    exposed = sum(block.count * float(block.times.offload_exposed[0]) for block in blocks)
    return Term(
        name="offload",
        axis=None,
        seconds=num_micro_batches * seconds,
        exposed_seconds=num_micro_batches * exposed,
    )


def pipeline_terms(
    pipeline: Pipeline,
    blocks: list[StageBlock],
    layout: Layout,
    rank: int,
    hops: list[float],
    *,
    waits: float,
) -> list[Term]:
    """Return what the pipeline adds to a rank's work: transfers, and waiting for other stages.

    Args:
        pipeline: The simulated step.
        blocks: All blocks of the rank.
        layout: For micro-batches and stages.
        rank: The rank.
        hops: Seconds of a transfer across each boundary of stages.
        waits: Seconds by which transfers lengthen the step.

    """
    m = layout.num_micro_batches
    computing = m * sum(stage_seconds(blocks))
    transfers = 2 * m * sum(hops) / layout.pipeline_parallel
    held = pipeline.busy[rank] - computing
    exposed = max(held, waits)
    exposed = exposed if exposed > _ROUNDING * computing else 0.0
    return [
        Term(name="p2p", axis="pp", seconds=max(transfers, exposed), exposed_seconds=exposed),
        local_term("bubble", pipeline.makespan - computing - exposed),
    ]


def rest_terms(rest: Rest) -> list[Term]:
    """Return what a rank does once per step."""
    return [
        Term(
            name="grad_reduce", axis="dp", seconds=rest.reduce, exposed_seconds=rest.reduce_exposed
        ),
        Term(
            name="param_gather", axis="dp", seconds=rest.gather, exposed_seconds=rest.gather_exposed
        ),
        local_term("optimizer", rest.update),
    ]


def local_term(name: str, seconds: float) -> Term:
    """Return a term of work that nothing hides."""
    return Term(name=name, axis=None, seconds=seconds, exposed_seconds=seconds)
