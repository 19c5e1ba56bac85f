"""Which pipeline schedules can order which stages and micro-batches.

The predicates are the schedule generators' own (`costmodels/schedule/shape.py`), so that what is
legal here can be built, simulated and run.
"""

import numpy as np

from costmodels.schedule.shape import shape_masks
from planner.rules.rule import Case, Mask, Rule

SHAPE_COLUMNS = ("schedule", "pipeline_parallel", "stages_per_rank", "num_micro_batches")


def _admitted(name: str, reads: tuple[str, ...], says: str, blames: tuple[str, ...]) -> Rule:
    """Return one of the generators' rules; columns that it does not read stay unread."""

    def holds(case: Case) -> Mask:
        unread = np.full(len(case.table), 1, dtype=np.int64)
        columns = [
            getattr(case.table, column) if column in reads else unread for column in SHAPE_COLUMNS
        ]
        return shape_masks(*columns)[name]

    return Rule(name=name, reads=reads, holds=holds, says=says, given=reads, blames=blames)


SCHEDULE_RULES: tuple[Rule, ...] = (
    _admitted(
        "pipeline_of_schedule",
        ("schedule", "pipeline_parallel"),
        "{schedule} (--schedule) overlaps pipeline stages, but pipeline parallel is "
        "{pipeline_parallel}",
        ("schedule", "pipeline_parallel"),
    ),
    _admitted(
        "stages_per_rank_of_schedule",
        ("schedule", "stages_per_rank"),
        "{schedule} (--schedule) does not run with {stages_per_rank} stages per rank "
        "(--stages-per-rank): gpipe and 1f1b take 1, interleaved-1f1b 2 or more, zbv and "
        "dualpipev exactly 2",
        ("schedule", "stages_per_rank"),
    ),
    _admitted(
        "micro_batches_fill_rounds",
        ("schedule", "stages_per_rank", "pipeline_parallel", "num_micro_batches"),
        "{schedule} (--schedule) orders micro-batches in equal rounds of at least "
        "{pipeline_parallel} (--pp); {num_micro_batches} of them do not divide so",
        ("schedule", "micro_batch_size", "pipeline_parallel"),
    ),
    _admitted(
        "micro_batches_fill_pipeline",
        ("schedule", "pipeline_parallel", "num_micro_batches"),
        "{schedule} (--schedule) needs a micro-batch for each of its stages, 2 x "
        "{pipeline_parallel} (--pp); there are {num_micro_batches}",
        ("schedule", "micro_batch_size", "pipeline_parallel"),
    ),
)


def schedules_of_target(*schedules: str) -> Rule:
    """Return the rule that a target has these schedules and no others."""
    return Rule(
        name="target_has_schedule",
        reads=("schedule", "pipeline_parallel"),
        holds=lambda case: (case.table.pipeline_parallel == 1) | case.uses(*schedules),
        says="{target} (--target) has no {schedule} schedule (--schedule); it has "
        + ", ".join(schedules),
        given=("schedule", "target"),
        blames=("schedule", "pipeline_parallel"),
    )
