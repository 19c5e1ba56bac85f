"""The actions of a step as the cost model has them: what a trace shows beside what was measured."""

from costmodels.schedule import Interval
from costmodels.time.stages import pipeline_times, step_intervals
from planner.plan import Plan


def predicted_actions(plan: Plan) -> dict[int, tuple[Interval, ...]]:
    """Return the predicted actions of each pipeline rank, seconds counted from the first one."""
    layout = plan.layout
    times = pipeline_times(plan.model, plan.job, plan.cluster, layout)
    intervals = step_intervals(times, layout, layout.num_micro_batches)
    return {
        rank: tuple(interval for interval in intervals if interval.rank == rank)
        for rank in range(layout.pipeline_parallel)
    }
