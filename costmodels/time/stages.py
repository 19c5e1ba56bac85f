"""From blocks to ranks: which blocks a stage holds, the pipeline of stages, work once per step."""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from costmodels.hardware import Cluster
from costmodels.job import TrainingJob
from costmodels.layout import Layout, Recompute, Schedule
from costmodels.layout_table import table_of
from costmodels.memory.states import ZERO_2
from costmodels.model import LayerKind, ModelSpec
from costmodels.schedule import (
    Interval,
    StageDurations,
    build_schedule,
    simulate_schedule,
    timeline,
)
from costmodels.time.collectives import exposed_seconds
from costmodels.time.layouts import BlockTimes, LayoutCosts, layout_costs, rank_state_seconds
from costmodels.time.overlap import Overlap, passes_beside, sends_hold_rank
from costmodels.time.tally import BlockCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBlock:
    """Equal blocks of a stage.

    Attributes:
        recomputed: How many of them run again in full in backward.

    """

    times: BlockTimes
    costs: BlockCosts
    count: int
    recomputed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A simulated step of the pipeline.

    Attributes:
        busy: Seconds in which each rank computes or is held by a transfer.
        idle: Seconds in which the average rank waits.

    """

    makespan: float
    busy: tuple[float, ...]
    idle: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimes:
    """What the simulation of a layout's pipeline needs besides its schedule.

    Attributes:
        hops: Seconds of a transfer across each boundary of global stages, 0 inside a rank.
        p2p_overlaps: A rank computes on while it sends.

    """

    durations: StageDurations
    hops: list[float]
    p2p_overlaps: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """What one rank does once per step: seconds by themselves, and what the step waits for."""

    reduce: float
    gather: float
    update: float
    reduce_exposed: float
    gather_exposed: float

    @property
    def exposed(self) -> float:
        """Seconds that the step waits for."""
        return self.reduce_exposed + self.gather_exposed + self.update


def stages_of(model: ModelSpec, layout: Layout, costs: LayoutCosts) -> list[list[StageBlock]]:
    """Return the blocks of every global stage; embedding first, head last.

    Full recomputation runs the first layers of a stage again; embedding and head keep what they
    made, as every framework does.
    """
    times, priced = dict(costs.layers), dict(costs.priced.layers)
    kinds = model.layer_kinds
    stages, start = [], 0
    for count in layout.layers_per_stage:
        own = kinds[start : start + count]
        again = _recomputed(layout, own)
        stages.append(
            [
                StageBlock(
                    times=times[kind], costs=priced[kind], count=number, recomputed=again[kind]
                )
                for kind, number in Counter(own).items()
            ]
        )
        start += count
    stages[0].append(StageBlock(times=costs.embedding, costs=costs.priced.embedding, count=1))
    stages[-1].append(StageBlock(times=costs.head, costs=costs.priced.head, count=1))
    return stages


def _recomputed(layout: Layout, kinds: tuple[LayerKind, ...]) -> Counter[LayerKind]:
    if layout.recompute is not Recompute.FULL:
        return Counter()
    return Counter(kinds[: layout.recompute_layers or len(kinds)])


def stage_seconds(blocks: list[StageBlock]) -> tuple[float, float, float]:
    """Return forward, backward_input (recomputation included) and backward_weight seconds."""
    forward = sum(b.count * float(b.times.forward[0]) for b in blocks)
    to_input = sum(
        b.count * float(b.times.backward_input[0]) + b.recomputed * float(b.times.recompute[0])
        for b in blocks
    )
    to_weight = sum(b.count * float(b.times.backward_weight[0]) for b in blocks)
    return forward, to_input, to_weight


def stage_durations(stages: list[list[StageBlock]]) -> StageDurations:
    """Return the seconds of every global stage, as a simulation takes them."""
    seconds = [stage_seconds(blocks) for blocks in stages]
    forward, to_input, to_weight = zip(*seconds, strict=True)
    return StageDurations(forward=forward, backward_input=to_input, backward_weight=to_weight)


def pipeline_times(
    model: ModelSpec, job: TrainingJob, cluster: Cluster, layout: Layout
) -> PipelineTimes:
    """Return the seconds that the estimate of a layout simulates its pipeline with."""
    costs = layout_costs(model, job, cluster, table_of([layout]), layout.recompute_modules)
    return PipelineTimes(
        durations=stage_durations(stages_of(model, layout, costs)),
        hops=stage_hops(layout, costs),
        p2p_overlaps=not sends_hold_rank(job, layout.schedule),
    )


def step_intervals(
    times: PipelineTimes, layout: Layout, num_micro_batches: int
) -> tuple[Interval, ...]:
    """Return when each action of a step of so many micro-batches runs, in predicted seconds.

    Raises:
        ValueError: The schedule does not admit the layout's shape.

    """
    table = build_schedule(
        layout.schedule, layout.pipeline_parallel, layout.stages_per_rank, num_micro_batches
    )
    return timeline(table, times.durations, times.hops, p2p_overlaps=times.p2p_overlaps)


def stage_hops(layout: Layout, costs: LayoutCosts) -> list[float]:
    """Return the seconds of a transfer across each boundary of global stages, 0 inside a rank.

    Ranks fill one domain after another; only the hops between domains take the network.
    """
    hops = costs.hops
    domain, far, near = int(hops.domain_ranks[0]), float(hops.far[0]), float(hops.near[0])
    return [
        0.0 if rank == other else near if rank // domain == other // domain else far
        for rank, other in pairwise(map(layout.rank_of_stage, range(layout.num_stages)))
    ]


def run_pipeline(
    job: TrainingJob, layout: Layout, stages: list[list[StageBlock]], hops: list[float]
) -> Pipeline:
    """Simulate the schedule with each stage's own seconds and each boundary's own transfer.

    Raises:
        ValueError: The schedule does not admit the layout's shape.

    """
    if layout.num_stages == 1:
        makespan = layout.num_micro_batches * sum(stage_seconds(stages[0]))
        return Pipeline(makespan=makespan, busy=(makespan,), idle=0.0)
    result = simulate_schedule(
        layout.schedule,
        layout.pipeline_parallel,
        layout.stages_per_rank,
        layout.num_micro_batches,
        stage_durations(stages),
        hops,
        p2p_overlaps=not sends_hold_rank(job, layout.schedule),
    )
    return Pipeline(
        makespan=result.makespan, busy=result.busy, idle=sum(result.idle) / len(result.busy)
    )


def transfer_waits(
    job: TrainingJob,
    layout: Layout,
    stages: list[list[StageBlock]],
    hops: list[float],
    pipeline: Pipeline,
) -> float:
    """Return seconds by which transfers lengthen a pipeline, whether or not they hold a rank."""
    if not any(hops):
        return 0.0
    free = run_pipeline(job, layout, stages, [0.0] * len(hops))
    return max(0.0, pipeline.makespan - free.makespan)


def rank_rest(
    blocks: list[StageBlock], layout: Layout, costs: LayoutCosts, overlap: Overlap
) -> Rest:
    """Return what one rank does once per step.

    In a pipeline the rank may recompute in time that it would wait for others, so that counting it
    as time to hide gradients behind would make a step faster by more work: it is left out there.

    Args:
        blocks: All blocks of the rank, over its stages.
        layout: For how often gradients are reduced.
        costs: Seconds per weight.
        overlap: What hides.

    """
    parts = np.zeros(3)
    for block in blocks:
        states = rank_state_seconds(costs.states, block.times.weights)
        parts += [block.count * float(part[0]) for part in states]
    reduce, gather, update = (float(part) for part in parts)
    forward, to_input, to_weight = stage_seconds(blocks)
    each = overlap.reduces_each_micro_batch and layout.zero_stage == ZERO_2
    interleaved = layout.schedule is Schedule.INTERLEAVED
    passes = float(
        passes_beside(
            layout.stages_per_rank if interleaved else 1,
            layout.pipeline_parallel,
            layout.num_micro_batches,
        )
    )
    backward = to_input + to_weight
    if layout.pipeline_parallel > 1:
        backward -= sum(b.recomputed * float(b.times.recompute[0]) for b in blocks)
    backward *= layout.num_micro_batches if each else passes
    waits = overlap.reduces_after_pipeline and layout.pipeline_parallel > 1
    return Rest(
        reduce=reduce,
        gather=gather,
        update=update,
        reduce_exposed=_left(reduce, backward, costs, hides=overlap.grad_reduce and not waits),
        gather_exposed=_left(gather, forward * passes, costs, hides=overlap.param_gather),
    )


def _left(communication: float, beside: float, costs: LayoutCosts, *, hides: bool) -> float:
    if not hides:
        return communication
    return float(exposed_seconds(communication, beside, costs.rates))
