"""The actions of a step as the cost model has them: what a trace shows beside what was measured."""

from costmodels.schedule import Interval, build_schedule, timeline
from costmodels.stages import pipeline_times
from planner.plan import Plan


def predicted_actions(plan: Plan) -> dict[int, tuple[Interval, ...]]:
    """Return the predicted actions of each pipeline rank, seconds counted from the first one."""
    layout = plan.layout
    times = pipeline_times(plan.model, plan.job, plan.cluster, layout)
    schedule = build_schedule(
        layout.schedule,
        layout.pipeline_parallel,
        layout.stages_per_rank,
        layout.num_micro_batches,
    )
    intervals = timeline(schedule, times.durations, times.hops, p2p_overlaps=times.p2p_overlaps)
    return {
        rank: tuple(interval for interval in intervals if interval.rank == rank)
        for rank in range(layout.pipeline_parallel)
    }
