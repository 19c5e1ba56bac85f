"""Which pipeline schedules can order which stages and micro-batches.

Sources: torch.distributed.pipelining `schedules.py` (2.13: single- and multi-stage schedules,
rounds of Interleaved1F1B and InterleavedZeroBubble, ZBV and DualPipeV with two stages per rank).
"""

import numpy as np

from planner.rules.rule import Case, Mask, Rule

STAGES_OF_A_V = 2  # down one half of the layers, back up the other


def _schedule_stages(case: Case) -> Mask:
    stages = case.table.stages_per_rank
    single = case.uses("gpipe", "1f1b")
    v_shaped = case.uses("zbv", "dualpipev")
    interleaved = case.uses("interleaved-1f1b")
    return np.asarray(
        (~single | (stages == 1))
        & (~v_shaped | (stages == STAGES_OF_A_V))
        & (~interleaved | (stages > 1)),
        dtype=np.bool_,
    )


def _schedule_micro_batches(case: Case) -> Mask:
    table = case.table
    in_rounds = case.uses("interleaved-1f1b", "zero-bubble") & (table.stages_per_rank > 1)
    rounds = np.maximum(1, table.num_micro_batches // table.pipeline_parallel)
    fills = table.num_micro_batches >= case.num_stages
    return np.asarray(
        (~in_rounds | (table.num_micro_batches % rounds == 0)) & (~case.uses("dualpipev") | fills),
        dtype=np.bool_,
    )


SCHEDULE_RULES: tuple[Rule, ...] = (
    Rule(
        name="schedule_needs_a_pipeline",
        reads=("schedule", "pipeline_parallel"),
        holds=lambda case: (case.table.pipeline_parallel > 1) | case.uses("gpipe", "1f1b"),
        says="{schedule} (--schedule) overlaps pipeline stages, but pipeline parallel is "
        "{pipeline_parallel}",
        given=("schedule", "pipeline_parallel"),
        blames=("schedule", "pipeline_parallel"),
    ),
    Rule(
        name="schedule_fits_stages_per_rank",
        reads=("schedule", "stages_per_rank"),
        holds=_schedule_stages,
        says="{schedule} (--schedule) does not run with {stages_per_rank} stages per rank "
        "(--stages-per-rank): gpipe and 1f1b take 1, interleaved-1f1b 2 or more, zbv and "
        "dualpipev exactly 2",
        given=("schedule", "stages_per_rank"),
        blames=("schedule", "stages_per_rank"),
    ),
    Rule(
        name="schedule_fits_micro_batches",
        reads=("schedule", "stages_per_rank", "pipeline_parallel", "num_micro_batches"),
        holds=_schedule_micro_batches,
        says="{schedule} (--schedule) cannot order {num_micro_batches} micro-batches over "
        "{num_stages} stages on {pipeline_parallel} ranks: interleaved schedules go in equal "
        "rounds of at least --pp micro-batches, dualpipev needs one for every stage",
        given=("schedule", "num_micro_batches", "num_stages", "pipeline_parallel"),
        blames=("schedule", "micro_batch_size", "pipeline_parallel"),
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
