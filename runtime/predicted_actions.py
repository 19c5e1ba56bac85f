"""The actions of a step as the cost model has them: what a trace shows beside what was measured."""

from costmodels.layout_costs import layout_costs
from costmodels.layout_table import table_of
from costmodels.overlap import sends_hold_rank
from costmodels.schedule import Interval, StageDurations, build_schedule, timeline
from costmodels.stages import stage_hops, stage_seconds, stages_of
from planner.plan import Plan


def predicted_actions(plan: Plan) -> dict[int, tuple[Interval, ...]]:
    """Return the predicted actions of each pipeline rank, seconds counted from the first one."""
    layout = plan.layout
    table = table_of([layout])
    costs = layout_costs(plan.model, plan.job, plan.cluster, table, layout.recompute_modules)
    seconds = [stage_seconds(blocks) for blocks in stages_of(plan.model, layout, costs)]
    forward, to_input, to_weight = zip(*seconds, strict=True)
    schedule = build_schedule(
        layout.schedule,
        layout.pipeline_parallel,
        layout.stages_per_rank,
        layout.num_micro_batches,
    )
    intervals = timeline(
        schedule,
        StageDurations(forward=forward, backward_input=to_input, backward_weight=to_weight),
        stage_hops(layout, costs),
        p2p_overlaps=not sends_hold_rank(plan.job, layout.schedule),
    )
    return {
        rank: tuple(interval for interval in intervals if interval.rank == rank)
        for rank in range(layout.pipeline_parallel)
    }
