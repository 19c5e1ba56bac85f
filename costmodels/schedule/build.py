"""Tables from shapes: one generator per family of schedules."""

from collections.abc import Callable
from functools import lru_cache

from costmodels.layout import Schedule
from costmodels.schedule.looped import looped_row
from costmodels.schedule.shape import PipelineShape, require_admitted
from costmodels.schedule.table import Row, ScheduleTable
from costmodels.schedule.v_shaped import dualpipev_row, zbv_row

_ROWS: dict[Schedule, Callable[[PipelineShape, int], Row]] = {
    Schedule.GPIPE: looped_row,
    Schedule.ONE_F_ONE_B: looped_row,
    Schedule.INTERLEAVED: looped_row,
    Schedule.ZERO_BUBBLE: looped_row,
    Schedule.ZBV: zbv_row,
    Schedule.DUALPIPEV: dualpipev_row,
}


def build_schedule(
    schedule: Schedule, pipeline_parallel: int, stages_per_rank: int, num_micro_batches: int
) -> ScheduleTable:
    """Return the table of compute actions of a schedule.

    Args:
        schedule: Which one.
        pipeline_parallel: Pipeline ranks.
        stages_per_rank: Stages on each rank (virtual stages).
        num_micro_batches: Micro-batches of one step.

    Raises:
        ValueError: The schedule does not admit these sizes (see `costmodels.schedule.shape`).

    """
    return table_of_shape(
        PipelineShape(
            schedule=Schedule(schedule),
            pipeline_parallel=pipeline_parallel,
            stages_per_rank=stages_per_rank,
            num_micro_batches=num_micro_batches,
        )
    )


@lru_cache(maxsize=256)
def table_of_shape(shape: PipelineShape) -> ScheduleTable:
    """Return the table of compute actions of a shape; the same as `build_schedule`.

    Raises:
        ValueError: The schedule does not admit these sizes.

    """
    require_admitted(shape)
    rows = tuple(_ROWS[shape.schedule](shape, rank) for rank in range(shape.pipeline_parallel))
    return ScheduleTable(shape=shape, rows=rows)
