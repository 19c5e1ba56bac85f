"""DeepSpeed: the engine's assertions.

Sources: deepspeed/runtime/pipe/engine.py and deepspeedai/DeepSpeed#823, #1629, #3589 (a pipeline
keeps whole gradients over its micro-batches: ZeRO-1 at most), deepspeed/runtime/config.py and
zero/config.py (what offload asks for), arXiv:2309.14509 (sequence parallelism is Ulysses), and
runtime/activation_checkpointing (activations move to the host as checkpoints).
"""

from costmodels.layout import Recompute
from costmodels.layout_table import RECOMPUTES
from planner.rules.common import COMMON, NO_KEEPING, context_types_of_target
from planner.rules.rule import CUTS_GRADIENTS, Rule
from planner.rules.schedules import schedules_of_target
from planner.rules.shapes import KV_HEADS_DIVIDE

FULL = RECOMPUTES.index(Recompute.FULL)

RULES: tuple[Rule, ...] = (
    *COMMON,
    NO_KEEPING,
    KV_HEADS_DIVIDE,
    schedules_of_target("1f1b"),
    context_types_of_target("ulysses"),
    Rule(
        name="pipeline_keeps_whole_gradients",
        reads=("zero_stage", "pipeline_parallel"),
        holds=lambda case: (
            (case.table.zero_stage < CUTS_GRADIENTS) | (case.table.pipeline_parallel == 1)
        ),
        says="ZeRO-{zero_stage} (--zero) shards gradients that a pipeline of {pipeline_parallel} "
        "(--pp) accumulates over its micro-batches; DeepSpeed allows ZeRO-1 at most",
        given=("zero_stage", "pipeline_parallel"),
        blames=("zero_stage", "pipeline_parallel"),
    ),
    Rule(
        name="offloaded_optimizer_is_sharded",
        reads=("offload_optimizer", "zero_stage"),
        holds=lambda case: (case.table.offload_optimizer == 0) | (case.table.zero_stage > 0),
        says="DeepSpeed offloads optimizer states (--offload {offload}) with ZeRO only; this is "
        "--zero {zero_stage}",
        given=("offload", "zero_stage"),
        blames=("zero_stage", "offload"),
    ),
    Rule(
        name="offloaded_activations_are_checkpoints",
        reads=("offload_activations", "recompute"),
        holds=lambda case: (case.table.offload_activations == 0) | (case.table.recompute == FULL),
        says="DeepSpeed moves activations to the host as checkpoints: --offload {offload} needs "
        "--recompute full, not {recompute}",
        given=("offload", "recompute"),
        blames=("recompute", "offload"),
    ),
)
