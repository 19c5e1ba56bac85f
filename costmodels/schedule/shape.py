"""PipelineShape: the four numbers that fix a schedule's table, and which of them are admitted.

    rule                          holds for                          requires
    stages_per_rank_of_schedule   gpipe, 1f1b                        1 stage per rank
                                  interleaved-1f1b                   2 or more
                                  zbv, dualpipev                     exactly 2
    pipeline_of_schedule          all but gpipe and 1f1b             2 or more pipeline ranks
    micro_batches_fill_rounds     interleaved-1f1b, and zero-bubble  m divisible by max(1, m // pp)
                                  with 2 or more stages per rank
    micro_batches_fill_pipeline   dualpipev                          m at least 2 * pp

gpipe, 1f1b and zbv run with any number of micro-batches, fewer than stages included (torch's
Schedule1F1B refuses those; our executor does not need to). The rule of rounds is torch's (its
Interleaved1F1B and InterleavedZeroBubble); Megatron-LM's is stricter, m divisible by pp, and is a
rule of that target. dualpipev's is DeepSeek's DualPipe and torch's ScheduleDualPipeV.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from costmodels.layout import Layout, Schedule, rank_of_stage
from costmodels.layout_table import SCHEDULES, is_one_of

Ints = NDArray[np.int64]

_ONE_STAGE = (Schedule.GPIPE, Schedule.ONE_F_ONE_B)
_TWO_STAGES = tuple(schedule for schedule in Schedule if schedule.is_v_shaped)
IN_ROUNDS = (Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineShape:
    """A schedule and the sizes that fix its table.

    Attributes:
        pipeline_parallel: Ranks of the pipeline.
        stages_per_rank: Stages on each rank.
        num_micro_batches: Micro-batches of one step.

    """

    schedule: Schedule
    pipeline_parallel: int
    stages_per_rank: int
    num_micro_batches: int

    def __post_init__(self) -> None:
        """Refuse sizes below one."""
        for name in ("pipeline_parallel", "stages_per_rank", "num_micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    @classmethod
    def of(cls, layout: Layout) -> "PipelineShape":
        """Return the shape of a layout's pipeline."""
        return cls(
            schedule=layout.schedule,
            pipeline_parallel=layout.pipeline_parallel,
            stages_per_rank=layout.stages_per_rank,
            num_micro_batches=layout.num_micro_batches,
        )

    @property
    def num_stages(self) -> int:
        """Global stages."""
        return self.pipeline_parallel * self.stages_per_rank

    @property
    def micro_batches_per_round(self) -> int:
        """Micro-batches that a rank runs through one stage before it turns to its next one."""
        if self.schedule not in IN_ROUNDS or self.stages_per_rank == 1:
            return 1
        rounds = max(1, self.num_micro_batches // self.pipeline_parallel)
        return self.num_micro_batches // rounds

    def shortened(self, pipelines_full: int) -> "PipelineShape":
        """Return a step of fewer micro-batches that fills, repeats and drains alike.

        Args:
            pipelines_full: Micro-batches left, in multiples of the pipeline's ranks (or of a
                round, if larger); the shape itself where it has fewer, or only fills and drains.

        """
        size = self.micro_batches_per_round
        spare = self.num_micro_batches - pipelines_full * max(self.pipeline_parallel, size)
        if self.schedule is Schedule.GPIPE or spare < size or self.num_micro_batches % size:
            return self
        shorter = replace(self, num_micro_batches=self.num_micro_batches - spare // size * size)
        return shorter if shorter.micro_batches_per_round == size else self

    @property
    def rank_of_stage(self) -> tuple[int, ...]:
        """Pipeline rank of each global stage: looped, or V-shaped for zbv and dualpipev."""
        return tuple(
            rank_of_stage(stage, self.pipeline_parallel, is_v_shaped=self.schedule.is_v_shaped)
            for stage in range(self.num_stages)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeRefusal:
    """Why a schedule does not admit a shape.

    Attributes:
        rule: Name of the broken rule.
        parameter: The number to change.
        allowed: Values of that parameter that the rule admits, nearest first.

    """

    rule: str
    message: str
    parameter: str
    given: int
    allowed: tuple[int, ...]


def shape_masks(
    schedule: Ints, pipeline_parallel: Ints, stages_per_rank: Ints, num_micro_batches: Ints
) -> dict[str, NDArray[np.bool_]]:
    """Return, for each rule, which shapes hold it.

    Args:
        schedule: Positions in `costmodels.layout_table.SCHEDULES`; all four arrays broadcast.
        pipeline_parallel: Pipeline ranks.
        stages_per_rank: Stages on each rank.
        num_micro_batches: Micro-batches of a step.

    """
    one = is_one_of(schedule, *_ONE_STAGE)
    two = is_one_of(schedule, *_TWO_STAGES)
    rounds = is_one_of(schedule, *IN_ROUNDS)
    interleaved = is_one_of(schedule, Schedule.INTERLEAVED)
    dual = is_one_of(schedule, Schedule.DUALPIPEV)
    v = stages_per_rank
    stages_fit = np.where(one, v == 1, np.where(two, v == 2, np.where(interleaved, v >= 2, v >= 1)))  # noqa: PLR2004 - the rule itself
    num_rounds = np.maximum(1, num_micro_batches // pipeline_parallel)
    return {
        "stages_per_rank_of_schedule": stages_fit,
        "pipeline_of_schedule": one | (pipeline_parallel >= 2),  # noqa: PLR2004 - the rule itself
        "micro_batches_fill_rounds": ~rounds | (v == 1) | (num_micro_batches % num_rounds == 0),
        "micro_batches_fill_pipeline": ~dual | (num_micro_batches >= 2 * pipeline_parallel),
    }


def shape_refusals(shape: PipelineShape) -> tuple[ShapeRefusal, ...]:
    """Return every rule that a shape breaks, with the numbers; empty where it is admitted."""
    masks = shape_masks(
        np.array(SCHEDULES.index(shape.schedule)),
        np.array(shape.pipeline_parallel),
        np.array(shape.stages_per_rank),
        np.array(shape.num_micro_batches),
    )
    return tuple(_refusal(rule, shape) for rule, holds in masks.items() if not holds)


def require_admitted(shape: PipelineShape) -> None:
    """Refuse a shape that its schedule does not admit.

    Raises:
        ValueError: With the first broken rule's message.

    """
    for refusal in shape_refusals(shape):
        raise ValueError(refusal.message)


def _refusal(rule: str, shape: PipelineShape) -> ShapeRefusal:
    name, pp, m = shape.schedule.value, shape.pipeline_parallel, shape.num_micro_batches
    if rule == "stages_per_rank_of_schedule":
        parameter, allowed = "stages_per_rank", _stages_allowed(shape.schedule)
        needs = "2 or more stages" if len(allowed) > 1 else f"exactly {allowed[0]} stage(s)"
        message = f"{name} needs {needs} per rank, not {shape.stages_per_rank}"
        if shape.schedule is Schedule.INTERLEAVED:
            message += "; with one it would be 1f1b"
    elif rule == "pipeline_of_schedule":
        parameter, allowed = "pipeline_parallel", (2,)
        message = f"{name} needs 2 or more pipeline ranks, not {pp}"
    elif rule == "micro_batches_fill_rounds":
        parameter, allowed = "num_micro_batches", _nearest_full_rounds(pp, m)
        rounds = max(1, m // pp)
        message = (
            f"{name} runs {m} micro-batches on {pp} pipeline ranks in {m} // {pp} = {rounds} "
            f"rounds, and {m} is not a multiple of {rounds}"
        )
    else:
        parameter, allowed = "num_micro_batches", (2 * pp,)
        message = f"{name} needs a micro-batch per stage, {2 * pp} on {pp} ranks, not {m}"
    return ShapeRefusal(
        rule=rule,
        message=f"{message}; nearest: {', '.join(map(str, allowed))}",
        parameter=parameter,
        given=getattr(shape, parameter),
        allowed=allowed,
    )


def _stages_allowed(schedule: Schedule) -> tuple[int, ...]:
    if schedule in _ONE_STAGE:
        return (1,)
    return (2,) if schedule in _TWO_STAGES else (2, 3, 4)


def _nearest_full_rounds(pipeline_parallel: int, num_micro_batches: int) -> tuple[int, ...]:
    """Return the nearest admitted counts below and above, nearest first."""

    def admitted(m: int) -> bool:
        return m % max(1, m // pipeline_parallel) == 0

    below = next(m for m in range(num_micro_batches, 0, -1) if admitted(m))
    above = next(
        m
        for m in range(num_micro_batches, num_micro_batches + pipeline_parallel + 1)
        if admitted(m)
    )
    return tuple(sorted((below, above), key=lambda m: (abs(m - num_micro_batches), m)))
