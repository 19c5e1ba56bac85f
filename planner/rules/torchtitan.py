"""torchtitan: its configuration checks.

Sources: torchtitan/distributed/parallel_dims.py (degrees, expert folding), pipeline_parallel.py
(schedules, stages per rank) and activation_checkpoint.py; pytorch/torchtitan#775 and #784 (fewer
micro-batches than stages hang); torch's ScheduleInterleavedZeroBubble takes several stages per
rank. Its data parallelism is DDP (ZeRO-0) or `fully_shard` (ZeRO-3; kept after forward, ZeRO-2).
"""

import numpy as np

from planner.rules.common import (
    COMMON,
    CONTEXT_NEEDS_FUSED_ATTENTION,
    NO_KEEPING,
    context_types_of_target,
)
from planner.rules.rule import Case, Mask, Rule
from planner.rules.schedules import schedules_of_target
from planner.rules.shapes import KV_HEADS_DIVIDE


def _micro_batches_fill_the_pipeline(case: Case) -> Mask:
    fills = case.table.num_micro_batches >= case.table.pipeline_parallel
    return np.asarray(fills | ~case.uses("1f1b"), dtype=np.bool_)


def _offload_is_whole(case: Case) -> Mask:
    table = case.table
    return np.asarray(
        (table.offload_optimizer == table.offload_parameters) & (table.offload_activations == 0),
        dtype=np.bool_,
    )


RULES: tuple[Rule, ...] = (
    *COMMON,
    NO_KEEPING,
    CONTEXT_NEEDS_FUSED_ATTENTION,
    KV_HEADS_DIVIDE,
    schedules_of_target("gpipe", "1f1b", "interleaved-1f1b", "zero-bubble", "zbv", "dualpipev"),
    context_types_of_target("ring", "all-gather"),
    Rule(
        name="micro_batches_fill_the_pipeline",
        reads=("schedule", "num_micro_batches", "pipeline_parallel"),
        holds=_micro_batches_fill_the_pipeline,
        says="{num_micro_batches} micro-batches do not fill {pipeline_parallel} pipeline stages "
        "(--pp): 1f1b in torch needs one per stage at least",
        given=("num_micro_batches", "pipeline_parallel", "micro_batch_size", "data_parallel"),
        blames=("micro_batch_size", "pipeline_parallel", "schedule"),
    ),
    Rule(
        name="zero_bubble_needs_stages",
        reads=("schedule", "stages_per_rank"),
        holds=lambda case: ~case.uses("zero-bubble") | (case.table.stages_per_rank > 1),
        says="zero-bubble in torch interleaves 2 or more stages per rank (--stages-per-rank "
        "{stages_per_rank})",
        given=("schedule", "stages_per_rank"),
        blames=("stages_per_rank", "schedule"),
    ),
    Rule(
        name="optimizer_states_shard_with_parameters",
        reads=("zero_stage", "data_parallel", "context_parallel"),
        holds=lambda case: (
            (case.table.zero_stage != 1)
            | (case.table.data_parallel * case.table.context_parallel == 1)
        ),
        says="torchtitan has no ZeRO-1 (--zero {zero_stage}): parameters are replicated (0) or "
        "sharded with their states (2 keeps them after forward, 3 frees them)",
        given=("zero_stage", "data_parallel"),
        blames=("zero_stage",),
    ),
    Rule(
        name="expert_tensor_parallel_is_one_or_tensor_parallel",
        reads=("expert_tensor_parallel", "tensor_parallel"),
        holds=lambda case: (
            (case.table.expert_tensor_parallel == 1)
            | (case.table.expert_tensor_parallel == case.table.tensor_parallel)
        ),
        says="expert tensor parallel {expert_tensor_parallel} (--etp) is neither 1 nor tensor "
        "parallel {tensor_parallel} (--tp)",
        given=("expert_tensor_parallel", "tensor_parallel"),
        blames=("expert_tensor_parallel", "tensor_parallel"),
    ),
    Rule(
        name="offload_is_of_all_states",
        reads=("offload_optimizer", "offload_parameters", "offload_activations"),
        holds=_offload_is_whole,
        says="torchtitan offloads parameters with their states (`enable_cpu_offload`) and no "
        "activations; this is --offload {offload}",
        given=("offload",),
        blames=("offload",),
    ),
)
