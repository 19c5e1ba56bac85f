"""nanotron: its configuration and engine assertions.

Sources: nanotron/parallel/pipeline_parallel/engine.py (AFAB and 1F1B, one stage per rank, at
least pp - 1 micro-batches), nanotron/config (zero_stage 0 or 1, recompute_layer on or off) and
the heads' assertions of nanotron/models/llama.py.
"""

from costmodels.layout import Recompute
from costmodels.layout_table import RECOMPUTES
from planner.rules.common import (
    COMMON,
    CONTEXT_NEEDS_FUSED_ATTENTION,
    NO_KEEPING,
    context_types_of_target,
)
from planner.rules.rule import CUTS_GRADIENTS, Rule
from planner.rules.schedules import schedules_of_target
from planner.rules.shapes import KV_HEADS_DIVIDE

SELECTIVE = RECOMPUTES.index(Recompute.SELECTIVE)

RULES: tuple[Rule, ...] = (
    *COMMON,
    NO_KEEPING,
    CONTEXT_NEEDS_FUSED_ATTENTION,
    KV_HEADS_DIVIDE,
    schedules_of_target("gpipe", "1f1b"),
    context_types_of_target("ring"),
    Rule(
        name="zero_stage_is_0_or_1",
        reads=("zero_stage",),
        holds=lambda case: case.table.zero_stage < CUTS_GRADIENTS,
        says="nanotron shards optimizer states (ZeRO-1) and no more; this is --zero {zero_stage}",
        given=("zero_stage",),
        blames=("zero_stage",),
    ),
    Rule(
        name="micro_batches_warm_the_pipeline",
        reads=("schedule", "num_micro_batches", "pipeline_parallel"),
        holds=lambda case: (
            (case.table.num_micro_batches >= case.table.pipeline_parallel - 1) | ~case.uses("1f1b")
        ),
        says="{num_micro_batches} micro-batches are fewer than pipeline parallel "
        "{pipeline_parallel} (--pp) less one, which nanotron's 1f1b asks for",
        given=("num_micro_batches", "pipeline_parallel"),
        blames=("micro_batch_size", "pipeline_parallel", "schedule"),
    ),
    Rule(
        name="recompute_is_whole_layers",
        reads=("recompute",),
        holds=lambda case: case.table.recompute != SELECTIVE,
        says="nanotron recomputes whole layers or nothing, not --recompute {recompute}",
        given=("recompute",),
        blames=("recompute",),
    ),
    Rule(
        name="nothing_is_offloaded",
        reads=("offload_optimizer", "offload_parameters", "offload_activations"),
        holds=lambda case: (
            case.table.offload_optimizer
            + case.table.offload_parameters
            + case.table.offload_activations
            == 0
        ),
        says="nanotron keeps everything on the device; this is --offload {offload}",
        given=("offload",),
        blames=("offload",),
    ),
)
