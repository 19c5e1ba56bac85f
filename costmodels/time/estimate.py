"""Time of one optimizer step of one layout: blocks to stages, stages to a pipeline, plus the rest.

    step = (pipeline + rest + step_overhead) * (1 + straggler_share * log2(nodes))

`pipeline` is the simulated makespan of the schedule's table with each stage's own seconds; `rest`
is what the slowest rank does once per step: the part of gradient reduction and parameter gathers
that the last backward (and the next forward) does not hide, and the optimizer. Nothing is averaged
over stages. Terms are those of the rank that is busy longest; the bubble is its idle time.
"""

import math

from costmodels.hardware import Cluster
from costmodels.job import TrainingJob
from costmodels.layout import Layout
from costmodels.layout_table import table_of
from costmodels.model import ModelSpec
from costmodels.parameters import model_flops_per_token
from costmodels.terms import TimeEstimate
from costmodels.time.layouts import BlockTimes, LayoutCosts, layout_costs, rank_state_seconds
from costmodels.time.overlap import overlap_of
from costmodels.time.stage_costs import BlockSeconds, StageCosts
from costmodels.time.stages import (
    Rest,
    StageBlock,
    rank_rest,
    run_pipeline,
    stage_hops,
    stages_of,
    transfer_waits,
)
from costmodels.time.step_terms import local_term, pipeline_terms, rest_terms, work_terms


def estimate_time(
    model: ModelSpec, job: TrainingJob, cluster: Cluster, layout: Layout
) -> TimeEstimate:
    """Return the time of one optimizer step, by term.

    Args:
        model: The network.
        job: What is trained per step.
        cluster: The machine.
        layout: How it is spread; legal (see planner.rules).

    Raises:
        ValueError: The device does not compute in the job's precision, or the schedule does not
            admit the layout's shape.

    """
    costs = layout_costs(model, job, cluster, table_of([layout]), layout.recompute_modules)
    hops, stages = stage_hops(layout, costs), stages_of(model, layout, costs)
    pipeline, ranks = run_pipeline(job, layout, stages, hops), _by_rank(layout, stages)
    rest = _slowest_rest(job, layout, costs, ranks)
    slowest = max(range(len(ranks)), key=lambda rank: pipeline.busy[rank])
    waits = transfer_waits(job, layout, stages, hops, pipeline)
    constants = cluster.profile.calibration
    terms = [
        *work_terms(ranks[slowest], layout),
        *pipeline_terms(pipeline, ranks[slowest], layout, slowest, hops, waits=waits),
        *rest_terms(rest),
        local_term("step_overhead", constants["step_overhead"]),
    ]
    before = sum(term.exposed_seconds for term in terms)
    stretch = stragglers(cluster)
    terms.append(local_term("stragglers", before * stretch))
    step = before * (1 + stretch)
    spread = 1 + constants["time_spread"]
    return TimeEstimate(
        terms=tuple(term for term in terms if term.seconds > 0 or term.exposed_seconds != 0),
        interval=(step / spread, step * spread),
        tokens=job.tokens_per_step,
        model_flops=model_flops_per_token(model, job.seq_len) * job.tokens_per_step,
        peak_flops=_mfu_peak(cluster),
        num_gpus=cluster.num_gpus,
        bubble_fraction=pipeline.idle / step,
    )


def step_seconds(
    model: ModelSpec, job: TrainingJob, cluster: Cluster, layout: Layout, costs: LayoutCosts
) -> float:
    """Return the seconds of `estimate_time` without its terms, equal up to rounding.

    Args:
        model: The network.
        job: What is trained per step.
        cluster: The machine.
        layout: How it is spread; legal.
        costs: Of the layout alone, whatever its split and its number of recomputed layers.

    Raises:
        ValueError: The schedule does not admit the layout's shape.

    """
    stages = stages_of(model, layout, costs)
    pipeline = run_pipeline(job, layout, stages, stage_hops(layout, costs))
    rest = _slowest_rest(job, layout, costs, _by_rank(layout, stages))
    before = pipeline.makespan + rest.exposed + cluster.profile.calibration["step_overhead"]
    return before * (1 + stragglers(cluster))


def _by_rank(layout: Layout, stages: list[list[StageBlock]]) -> list[list[StageBlock]]:
    """Return the blocks of every rank of the pipeline, over its stages."""
    return [
        [block for stage in layout.stages_of_rank(rank) for block in stages[stage]]
        for rank in range(layout.pipeline_parallel)
    ]


def _slowest_rest(
    job: TrainingJob, layout: Layout, costs: LayoutCosts, ranks: list[list[StageBlock]]
) -> Rest:
    """Return what the rank does once per step for which the step waits longest."""
    overlap = overlap_of(job)
    return max(
        (rank_rest(blocks, layout, costs, overlap) for blocks in ranks),
        key=lambda rest: rest.exposed,
    )


def stage_costs(
    model: ModelSpec,
    job: TrainingJob,
    cluster: Cluster,
    layout: Layout,
    costs: LayoutCosts | None = None,
) -> StageCosts:
    """Return seconds per block of a layout, whatever its partition of layers.

    Args:
        model: The network.
        job: What is trained per step.
        cluster: The machine.
        layout: Its degrees and choices; `layers_per_stage` does not matter.
        costs: Of the layout alone, where they are known.

    """
    if costs is None:
        costs = layout_costs(model, job, cluster, table_of([layout]), layout.recompute_modules)

    def seconds(times: BlockTimes) -> BlockSeconds:
        reduce, gather, update = rank_state_seconds(costs.states, times.weights)
        return BlockSeconds(
            forward=float(times.forward[0]),
            backward_input=float(times.backward_input[0]),
            backward_weight=float(times.backward_weight[0]),
            recompute=float(times.recompute[0]),
            rest=float(reduce[0] + gather[0] + update[0]),
        )

    return StageCosts(
        layers=tuple((kind, seconds(times)) for kind, times in costs.layers),
        embedding=seconds(costs.embedding),
        head=seconds(costs.head),
        way=float(costs.hops.way[0]),
        fixed_rest=cluster.profile.calibration["step_overhead"],
    )


def stragglers(cluster: Cluster) -> float:
    """Return the share that waiting for the slowest of many nodes adds to a step."""
    return cluster.profile.calibration["straggler_share"] * math.log2(cluster.num_nodes)


def _mfu_peak(cluster: Cluster) -> float:
    """Return the dense bf16 peak; fp16's on parts without bf16.

    Raises:
        ValueError: The profile states no peak.

    """
    device = cluster.profile.device
    for precision in ("bf16", "fp16", "fp32"):
        peak = device.peak(precision)
        if peak is not None:
            return peak
    raise ValueError(f"{cluster.profile.name} states no bf16, fp16 or fp32 peak")
