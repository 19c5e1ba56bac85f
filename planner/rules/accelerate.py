"""Hugging Face Accelerate: DDP, FSDP and DeepSpeed's ZeRO behind one launcher.

Sources: accelerate/parallelism_config.py (data, tensor and context axes; no training pipeline and
no expert axis; replicas with a tensor or context axis and nothing sharded are refused), the FSDP
plugin's options (activation checkpointing is per layer; CPU offload takes parameters with their
states, the DeepSpeed plugin optimizer states alone), huggingface/trl#3994 (`cp_size` is FSDP's,
`sp_size` DeepSpeed's).
"""

import numpy as np

from costmodels.layout import Recompute
from costmodels.layout_table import RECOMPUTES
from planner.rules.common import COMMON, CONTEXT_NEEDS_FUSED_ATTENTION, NO_KEEPING
from planner.rules.rule import Case, Mask, Rule
from planner.rules.shapes import KV_HEADS_DIVIDE, ULYSSES

SELECTIVE = RECOMPUTES.index(Recompute.SELECTIVE)


def by_deepspeed(case: Case) -> Mask:
    """Return where Accelerate takes DeepSpeed: ZeRO-1, Ulysses, states offloaded alone."""
    table = case.table
    ulysses = (table.context_parallel > 1) & (table.context_parallel_type == ULYSSES)
    alone = (table.offload_optimizer > 0) & (table.offload_parameters == 0)
    return np.asarray((table.zero_stage == 1) | ulysses | alone, dtype=np.bool_)


def _axes_have_shards(case: Case) -> Mask:
    table = case.table
    shards = (table.zero_stage > 0) & (table.zero_group > table.context_parallel)
    is_split = table.tensor_parallel * table.context_parallel > 1
    replicates = (table.data_parallel > 1) & ~shards
    return np.asarray(by_deepspeed(case) | ~(replicates & is_split), dtype=np.bool_)


def _context_is_sharded(case: Case) -> Mask:
    table = case.table
    shards = (table.zero_stage > 1) & ~by_deepspeed(case)
    is_ulysses = table.context_parallel_type == ULYSSES
    return np.asarray((table.context_parallel == 1) | is_ulysses | shards, dtype=np.bool_)


RULES: tuple[Rule, ...] = (
    *COMMON,
    NO_KEEPING,
    CONTEXT_NEEDS_FUSED_ATTENTION,
    KV_HEADS_DIVIDE,
    Rule(
        name="no_pipeline",
        reads=("pipeline_parallel",),
        holds=lambda case: case.table.pipeline_parallel == 1,
        says="Accelerate does not train in a pipeline; this is pipeline parallel "
        "{pipeline_parallel} (--pp)",
        given=("pipeline_parallel",),
        blames=("pipeline_parallel",),
    ),
    Rule(
        name="no_expert_parallelism",
        reads=("expert_parallel", "expert_tensor_parallel"),
        holds=lambda case: case.table.expert_parallel * case.table.expert_tensor_parallel == 1,
        says="Accelerate has no expert axis; this is expert parallel {expert_parallel} (--ep), "
        "expert tensor parallel {expert_tensor_parallel} (--etp)",
        given=("expert_parallel", "expert_tensor_parallel"),
        blames=("expert_parallel", "expert_tensor_parallel"),
    ),
    Rule(
        name="axes_beside_data_parallelism_need_shards",
        reads=(
            "zero_stage",
            "zero_group",
            "data_parallel",
            "tensor_parallel",
            "context_parallel",
            "context_parallel_type",
            "offload_optimizer",
            "offload_parameters",
        ),
        holds=_axes_have_shards,
        says="Accelerate composes tensor parallel {tensor_parallel} and context parallel "
        "{context_parallel} with sharded data parallelism only (FSDP, --zero 2 or 3): --zero "
        "{zero_stage} in groups of {zero_group} makes {data_parallel} replicas",
        given=("zero_stage", "zero_group", "data_parallel", "tensor_parallel", "context_parallel"),
        blames=("zero_stage", "zero_group", "tensor_parallel", "context_parallel"),
    ),
    Rule(
        name="context_parallel_needs_fsdp",
        reads=(
            "context_parallel",
            "context_parallel_type",
            "zero_stage",
            "offload_optimizer",
            "offload_parameters",
        ),
        holds=_context_is_sharded,
        says="{context_parallel_type} context parallel {context_parallel} in Accelerate is FSDP's "
        "(--zero 2 or 3, offload of all states or none), and DeepSpeed's is ulysses; this is "
        "--zero {zero_stage}, --offload {offload}",
        given=("context_parallel", "context_parallel_type", "zero_stage", "offload"),
        blames=("zero_stage", "context_parallel_type", "context_parallel"),
    ),
    Rule(
        name="recompute_is_whole_layers",
        reads=("recompute",),
        holds=lambda case: case.table.recompute != SELECTIVE,
        says="Accelerate recomputes whole layers or nothing, not --recompute {recompute}",
        given=("recompute",),
        blames=("recompute",),
    ),
    Rule(
        name="offloaded_optimizer_is_sharded",
        reads=("offload_optimizer", "zero_stage"),
        holds=lambda case: (case.table.offload_optimizer == 0) | (case.table.zero_stage > 0),
        says="states move to the host (--offload {offload}) with FSDP or ZeRO only; this is "
        "--zero {zero_stage}",
        given=("offload", "zero_stage"),
        blames=("zero_stage", "offload"),
    ),
    Rule(
        name="activations_stay_on_the_device",
        reads=("offload_activations",),
        holds=lambda case: case.table.offload_activations == 0,
        says="Accelerate does not offload activations (--offload {offload})",
        given=("offload",),
        blames=("offload",),
    ),
)
