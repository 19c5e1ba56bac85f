"""Hugging Face Accelerate: DDP, FSDP and DeepSpeed's ZeRO behind one launcher.

Sources: accelerate/parallelism_config.py (data, tensor and context axes; no training pipeline and
no expert axis), the FSDP plugin's options (activation checkpointing is per layer; CPU offload
takes parameters with their states, the DeepSpeed plugin optimizer states alone).
"""

from costmodels.layout import Recompute
from costmodels.layout_table import RECOMPUTES
from planner.rules.common import COMMON, NO_KEEPING
from planner.rules.rule import Rule
from planner.rules.shapes import KV_HEADS_DIVIDE

SELECTIVE = RECOMPUTES.index(Recompute.SELECTIVE)

RULES: tuple[Rule, ...] = (
    *COMMON,
    NO_KEEPING,
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
