"""Pipeline schedules: a schedule is a table of actions with three readers.

The cost model simulates a table, the runtime executes one rank's row, the plan stores the rows as
torch's action strings.

    build_schedule        (schedule, pp, v, m) -> ScheduleTable of compute actions
    with_communication    adds sends and receives
    validate              says what is wrong with a table
    simulate, timeline    when everything happens
    simulate_schedule     the same for a shape, in time that m hardly matters to
    makespan_lower_bound  what no partition of the layers beats, for many shapes at once
    held_moments          micro-batches whose activations a rank holds, moment by moment
    shape_refusals        which (pp, v, m) a schedule admits, and why not

A new schedule is a function from shape and rank to a row (see `looped.py`), an entry in `build.py`
and its rule in `shape.py`.
"""

from costmodels.schedule.action import Action, ActionKind, parse_action
from costmodels.schedule.bound import PipelineSums, makespan_lower_bound
from costmodels.schedule.build import build_schedule
from costmodels.schedule.communication import with_communication
from costmodels.schedule.in_flight import (
    HeldMoments,
    held_moments,
    in_flight,
    in_flight_closed_form,
)
from costmodels.schedule.shape import PipelineShape, ShapeRefusal, shape_masks, shape_refusals
from costmodels.schedule.simulation import (
    Interval,
    Simulation,
    StageDurations,
    simulate,
    timeline,
)
from costmodels.schedule.steady import simulate_schedule
from costmodels.schedule.table import ScheduleTable, format_grid, table_from_strings
from costmodels.schedule.validation import validate

__all__ = [
    "Action",
    "ActionKind",
    "HeldMoments",
    "Interval",
    "PipelineShape",
    "PipelineSums",
    "ScheduleTable",
    "ShapeRefusal",
    "Simulation",
    "StageDurations",
    "build_schedule",
    "format_grid",
    "held_moments",
    "in_flight",
    "in_flight_closed_form",
    "makespan_lower_bound",
    "parse_action",
    "shape_masks",
    "shape_refusals",
    "simulate",
    "simulate_schedule",
    "table_from_strings",
    "timeline",
    "validate",
    "with_communication",
]
