"""Megatron-LM (Megatron-Core): its argument checks.

Sources: megatron/training/arguments.py, megatron/core/transformer/transformer_config.py and
megatron/core/pipeline_parallel/schedules.py; NVIDIA/Megatron-LM#1587 (experts and sequence
parallelism), #1304 and #1778 (layers over stages). Uneven splits are written with
`--pipeline-model-parallel-layout` and are legal when they hold every layer. The optimizer states
are ZeRO-1 (distributed optimizer); stages 2 and 3 are Megatron-FSDP, which excludes a pipeline.
"""

import numpy as np

from costmodels.job import Precision
from planner.rules.common import COMMON, CONTEXT_NEEDS_FUSED_ATTENTION, NO_KEEPING
from planner.rules.rule import CUTS_GRADIENTS, Case, Mask, Rule
from planner.rules.schedules import schedules_of_target


def _kv_heads_fit(case: Case) -> Mask:
    tensor, groups = case.table.tensor_parallel, case.model.num_kv_heads
    return np.asarray((groups % tensor == 0) | (tensor % groups == 0), dtype=np.bool_)


def _experts_need_sequence_parallel(case: Case) -> Mask:
    without = (case.table.tensor_parallel > 1) & (case.table.sequence_parallel == 0)
    return np.asarray(~without if case.model.moe else case.always(holds=True), dtype=np.bool_)


def _rounds_are_full(case: Case) -> Mask:
    table = case.table
    rest = table.num_micro_batches % table.pipeline_parallel
    return np.asarray((rest == 0) | (table.stages_per_rank == 1), dtype=np.bool_)


RULES: tuple[Rule, ...] = (
    *COMMON,
    NO_KEEPING,
    CONTEXT_NEEDS_FUSED_ATTENTION,
    Rule(
        name="tensor_parallel_fits_kv_heads",
        reads=("tensor_parallel",),
        holds=_kv_heads_fit,
        says="the {num_kv_heads} key-value heads of {model} are neither a multiple nor a divisor "
        "of tensor parallel {tensor_parallel} (--tp)",
        given=("tensor_parallel", "num_kv_heads"),
        blames=("tensor_parallel",),
    ),
    Rule(
        name="experts_with_tensor_parallel_need_sequence_parallel",
        reads=("tensor_parallel", "sequence_parallel"),
        holds=_experts_need_sequence_parallel,
        says="a mixture of experts ({num_experts} experts) with tensor parallel {tensor_parallel} "
        "needs sequence parallelism in Megatron (--sequence-parallel)",
        given=("tensor_parallel", "sequence_parallel", "num_experts"),
        blames=("sequence_parallel", "tensor_parallel"),
    ),
    Rule(
        name="expert_parallel_excludes_fp16",
        reads=("expert_parallel",),
        holds=lambda case: (
            (case.table.expert_parallel == 1)
            | case.always(holds=case.job.precision is not Precision.FP16)
        ),
        says="Megatron does not train in {precision} (--precision) with expert parallel "
        "{expert_parallel} (--ep)",
        given=("expert_parallel", "precision"),
        blames=("precision", "expert_parallel"),
    ),
    schedules_of_target("1f1b", "interleaved-1f1b"),
    Rule(
        name="interleaved_rounds_are_full",
        reads=("stages_per_rank", "num_micro_batches", "pipeline_parallel"),
        holds=_rounds_are_full,
        says="interleaving in Megatron needs a multiple of {pipeline_parallel} (--pp) "
        "micro-batches; there are {num_micro_batches}",
        given=("num_micro_batches", "pipeline_parallel", "stages_per_rank"),
        blames=("micro_batch_size", "stages_per_rank", "pipeline_parallel"),
    ),
    Rule(
        name="sharded_gradients_exclude_a_pipeline",
        reads=("zero_stage", "pipeline_parallel"),
        holds=lambda case: (
            (case.table.zero_stage < CUTS_GRADIENTS) | (case.table.pipeline_parallel == 1)
        ),
        says="ZeRO-{zero_stage} (--zero) is Megatron-FSDP, which does not run in a pipeline of "
        "{pipeline_parallel} (--pp); the distributed optimizer is --zero 1",
        given=("zero_stage", "pipeline_parallel"),
        blames=("zero_stage", "pipeline_parallel"),
    ),
    Rule(
        name="parameters_stay_on_the_device",
        reads=("offload_parameters",),
        holds=lambda case: case.table.offload_parameters == 0,
        says="Megatron offloads optimizer states or activations, not parameters (--offload "
        "{offload})",
        given=("offload",),
        blames=("offload",),
    ),
    Rule(
        name="activation_offload_excludes_pipeline_and_recompute",
        reads=("offload_activations", "pipeline_parallel", "recompute"),
        holds=lambda case: (
            (case.table.offload_activations == 0)
            | ((case.table.pipeline_parallel == 1) & (case.table.recompute == 0))
        ),
        says="activation offload (--offload {offload}) in Megatron excludes a pipeline (--pp "
        "{pipeline_parallel}) and recomputation (--recompute {recompute})",
        given=("offload", "pipeline_parallel", "recompute"),
        blames=("offload", "recompute", "pipeline_parallel"),
    ),
)
