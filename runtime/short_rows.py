"""Short steps from which a long one follows, for a rank of a pipeline.

With one stage per rank a row is two numbers: w forwards before the first backward, and d weight
gradients that are put off (`costmodels.schedule.looped`). Once a row is steady it repeats with each
micro-batch, and one more w or d holds one more micro-batch, or one more input and gradient of its
products. So the row of place r of p ranks follows from rows of a pipeline of a few:

    FLOPs, bytes   grow by the same with each micro-batch
    peak           base + w * (a micro-batch) + d * (what its weight gradients need)
                   gpipe: base + m * (a micro-batch)

The ends of the pipeline stay ends: they exchange with one side only. With several stages per rank
whole rounds are left out and no rank is: a row of two rounds fills, repeats once and drains, so it
holds the most that any longer one does. Steps too short to be steady are run as they are.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from costmodels.layout import Layout, Schedule
from costmodels.schedule import Action, PipelineShape
from runtime.lower import actions_of

# Of w, d and rounds in the shortest row: the second forward, the second put-off gradient and the
# second round are as all later.
_LEAST = 2
_ONE_STAGE = (Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was read off a step: executed FLOPs, bytes by axis of the mesh, peak bytes alive."""

    flops: int
    num_bytes: Counter[str]
    peak: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortStep:
    """A step to run in place of the rank's own.

    Attributes:
        pipeline_parallel: Ranks of the pipeline that the row is taken from.
        place: The rank's place in it.
        num_micro_batches: Of the step.

    """

    pipeline_parallel: int
    place: int
    num_micro_batches: int

    def actions(self, layout: Layout, place: int) -> tuple[Action, ...]:
        """Return the row, on the stages of the rank at `place` of the layout's own pipeline."""
        short = replace(
            layout,
            pipeline_parallel=self.pipeline_parallel,
            num_micro_batches=self.num_micro_batches,
        )
        stages = dict(
            zip(short.stages_of_rank(self.place), layout.stages_of_rank(place), strict=True)
        )
        row = actions_of(short, self.place)
        return tuple(replace(action, stage=stages[action.stage]) for action in row)


def short_steps(layout: Layout, place: int) -> tuple[ShortStep, ...]:
    """Return the steps to run for the rank at a place of the pipeline, the shortest first.

    One where the plan's own is as short. Otherwise the second has more micro-batches and may hold
    one more; a third puts one more weight gradient off.
    """
    count, ranks = layout.num_micro_batches, layout.pipeline_parallel
    whole = ShortStep(pipeline_parallel=ranks, place=place, num_micro_batches=count)
    if ranks > 1 and (layout.stages_per_rank > 1 or layout.schedule not in _ONE_STAGE):
        return _of_fewer_rounds(layout, whole)
    ahead, behind = min(place, _LEAST), min(ranks - 1 - place, _LEAST)
    puts_off = layout.schedule is Schedule.ZERO_BUBBLE
    first = min(ranks - 1, _LEAST * (1 + puts_off)) + 2  # the same for all ranks: messages match
    if count <= max(first + 1, ranks):  # the plan's own row may not become steady
        return (whole,)
    steps = [
        _step(ahead, behind, first),
        _step(ahead, min(ranks - 1 - place, _LEAST + 1), first + 1),
    ]
    if puts_off and place > _LEAST:
        steps.append(_step(_LEAST + 1, behind, first + 1))
    return tuple(steps)


def _of_fewer_rounds(layout: Layout, whole: ShortStep) -> tuple[ShortStep, ...]:
    """Return steps of two and of three rounds; what does not fill one stays in both."""
    shape = PipelineShape(
        schedule=layout.schedule,
        pipeline_parallel=layout.pipeline_parallel,
        stages_per_rank=layout.stages_per_rank,
        num_micro_batches=layout.num_micro_batches,
    )
    size = max(shape.micro_batches_per_round, shape.pipeline_parallel)
    first = _LEAST * size + shape.num_micro_batches % size
    if first + size >= shape.num_micro_batches:
        return (whole,)
    return tuple(replace(whole, num_micro_batches=m) for m in (first, first + size))


def _step(ahead: int, behind: int, num_micro_batches: int) -> ShortStep:
    return ShortStep(
        pipeline_parallel=ahead + 1 + behind, place=ahead, num_micro_batches=num_micro_batches
    )


def flops_of(layout: Layout, steps: Sequence[ShortStep], found: Sequence[Figures]) -> int:
    """Return the FLOPs of the plan's own step."""
    return _grown(layout, steps, [figures.flops for figures in found])


def bytes_of(layout: Layout, steps: Sequence[ShortStep], found: Sequence[Figures]) -> Counter[str]:
    """Return the bytes of the plan's own step, by axis."""
    return Counter(
        {
            axis: _grown(layout, steps, [figures.num_bytes[axis] for figures in found])
            for axis in found[0].num_bytes
        }
    )


def peak_of(
    layout: Layout, place: int, steps: Sequence[ShortStep], found: Sequence[Figures]
) -> int:
    """Return the peak of the plan's own step."""
    if len(steps) == 1:
        return found[0].peak
    first = steps[0]
    if layout.schedule is Schedule.GPIPE or first.pipeline_parallel == layout.pipeline_parallel:
        return _grown(layout, steps, [figures.peak for figures in found])
    return found[0].peak + sum(
        more * (found[i].peak - found[0].peak)
        for i, more in enumerate(_held_more(layout, place, first), 1)
        if more
    )


def _held_more(layout: Layout, place: int, first: ShortStep) -> tuple[int, int]:
    """Return how many more forwards come first, and weight gradients last, than in a short step."""
    behind = layout.pipeline_parallel - 1 - place
    puts_off = layout.schedule is Schedule.ZERO_BUBBLE
    return (
        behind - (first.pipeline_parallel - 1 - first.place),
        (place - first.place) * puts_off,
    )


def _grown(layout: Layout, steps: Sequence[ShortStep], values: Sequence[int]) -> int:
    """Return a figure that grows by the same with each micro-batch."""
    if len(steps) == 1:
        return values[0]
    first, second = (step.num_micro_batches for step in steps[:2])
    repeats, remainder = divmod(layout.num_micro_batches - first, second - first)
    assert remainder == 0, f"{layout.num_micro_batches} micro-batches do not follow from {first}"
    return values[0] + repeats * (values[1] - values[0])
