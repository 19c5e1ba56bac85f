"""What every runtime demands of a layout; rules of one target are in the file of its name.

First the machine and the batch, then the model's shape (`shapes.py`), then the schedule
(`schedules.py`): the first rule broken is the one that a rejected layout is counted under.
Sources: the definitions of the axes in `costmodels/layout.py`; Megatron-LM `arguments.py` and
`parallel_state.py`; DeepSpeed configuration guide (parameters offload with ZeRO-3 only).
"""

import numpy as np

from costmodels.layout_table import CONTEXT_PARALLEL_TYPES
from planner.rules.rule import CUTS_PARAMETERS, Case, Mask, Rule
from planner.rules.schedules import SCHEDULE_RULES
from planner.rules.shapes import SHAPE_RULES


def _whole_nodes(case: Case) -> Mask:
    gpus, node = case.cluster.num_gpus, case.cluster.gpus_per_node
    return case.always(holds=gpus <= node or gpus % node == 0)


def _precision_supported(case: Case) -> Mask:
    device = case.cluster.profile.device
    return case.always(holds=device.peak(case.job.precision) is not None)


GRID_RULES: tuple[Rule, ...] = (
    Rule(
        name="gpus_fill_whole_nodes",
        reads=(),
        holds=_whole_nodes,
        says="{gpus} GPUs (--gpus) do not fill whole nodes of {gpus_per_node} (--gpus-per-node)",
        given=("gpus", "gpus_per_node"),
        blames=("gpus",),
    ),
    Rule(
        name="precision_supported",
        reads=(),
        holds=_precision_supported,
        says="{hardware} has no {precision} matrix products (--precision; device.peak_tflops of "
        "the profile)",
        given=("precision", "hardware"),
        blames=("precision",),
    ),
    Rule(
        name="degrees_fill_the_gpus",
        reads=("data_parallel", "tensor_parallel", "pipeline_parallel", "context_parallel"),
        holds=lambda case: case.stage_ranks * case.table.pipeline_parallel == case.cluster.num_gpus,
        says="dp {data_parallel} x tp {tensor_parallel} x pp {pipeline_parallel} x cp "
        "{context_parallel} = {degree_product} ranks, but there are {gpus} GPUs (--gpus)",
        given=("degree_product", "gpus"),
        blames=("data_parallel", "tensor_parallel", "pipeline_parallel", "context_parallel"),
    ),
    Rule(
        name="batch_is_whole_micro_batches",
        reads=("data_parallel", "micro_batch_size", "num_micro_batches"),
        holds=lambda case: (
            case.table.micro_batch_size * case.table.num_micro_batches * case.table.data_parallel
            == case.job.global_batch_size
        ),
        says="a global batch of {global_batch_size} sequences (--global-batch-size) is not a whole "
        "number of micro-batches of {micro_batch_size} (--mbs) on {data_parallel} data-parallel "
        "ranks: {micro_batch_size} x {num_micro_batches} x {data_parallel} = {layout_batch}",
        given=("global_batch_size", "micro_batch_size", "data_parallel", "num_micro_batches"),
        blames=("micro_batch_size", "data_parallel", "global_batch_size"),
    ),
    Rule(
        name="experts_fold_into_a_stage",
        reads=(
            "expert_parallel",
            "expert_tensor_parallel",
            "data_parallel",
            "context_parallel",
            "tensor_parallel",
        ),
        holds=lambda case: (
            case.stage_ranks % (case.table.expert_parallel * case.table.expert_tensor_parallel) == 0
        ),
        says="expert parallel {expert_parallel} x expert tensor parallel {expert_tensor_parallel} "
        "= {expert_ranks} does not divide the {stage_ranks} ranks of a pipeline stage (dp "
        "{data_parallel} x cp {context_parallel} x tp {tensor_parallel})",
        given=("expert_parallel", "expert_tensor_parallel", "stage_ranks"),
        blames=("expert_parallel", "expert_tensor_parallel", "pipeline_parallel"),
    ),
    Rule(
        name="zero_group_divides_ranks",
        reads=("zero_group", "data_parallel", "context_parallel"),
        holds=lambda case: (
            (case.table.data_parallel * case.table.context_parallel) % case.table.zero_group == 0
        ),
        says="a ZeRO group of {zero_group} ranks (--zero-group) does not divide dp "
        "{data_parallel} x cp {context_parallel} = {zero_ranks}",
        given=("zero_group", "data_parallel", "context_parallel"),
        blames=("zero_group",),
    ),
    Rule(
        name="zero_stage_is_known",
        reads=("zero_stage",),
        holds=lambda case: (
            (case.table.zero_stage >= 0) & (case.table.zero_stage <= CUTS_PARAMETERS)
        ),
        says="there is no ZeRO stage {zero_stage} (--zero)",
        given=("zero_stage",),
        blames=("zero_stage",),
    ),
    Rule(
        name="kept_weights_come_from_other_ranks",
        reads=("keep_gathered", "zero_stage", "offload_parameters"),
        holds=lambda case: (
            (case.table.keep_gathered == 0)
            | ((case.table.zero_stage == CUTS_PARAMETERS) & (case.table.offload_parameters == 0))
        ),
        says="gathered weights are kept over a step (--keep-gathered) where --zero 3 gathers them "
        "from other GPUs; this is --zero {zero_stage}, --offload {offload}",
        given=("keep_gathered", "zero_stage", "offload"),
        blames=("keep_gathered", "zero_stage", "offload"),
    ),
    Rule(
        name="offloaded_parameters_are_sharded",
        reads=("offload_parameters", "zero_stage"),
        holds=lambda case: (
            (case.table.offload_parameters == 0) | (case.table.zero_stage == CUTS_PARAMETERS)
        ),
        says="parameters move to host memory (--offload {offload}) only where they are gathered "
        "layer by layer, with --zero 3; this is --zero {zero_stage}",
        given=("offload", "zero_stage"),
        blames=("zero_stage", "offload"),
    ),
)

COMMON = GRID_RULES + SHAPE_RULES + SCHEDULE_RULES


def context_types_of_target(*kinds: str) -> Rule:
    """Return the rule that a target splits sequences in these ways and no others."""
    codes = [code for code, kind in enumerate(CONTEXT_PARALLEL_TYPES) if kind in kinds]
    return Rule(
        name="target_has_context_parallel_type",
        reads=("context_parallel", "context_parallel_type"),
        holds=lambda case: (
            (case.table.context_parallel == 1) | np.isin(case.table.context_parallel_type, codes)
        ),
        says="{target} (--target) has no {context_parallel_type} context parallelism (--cp-type); "
        "it has " + ", ".join(kinds),
        given=("context_parallel_type", "context_parallel", "target"),
        blames=("context_parallel_type", "context_parallel"),
    )


# Parts of a sequence meet by the log-sum-exp that a fused kernel returns: Transformer Engine's
# unfused attention excludes context parallelism (attention/dot_product_attention/utils.py), torch's
# `context_parallel` dispatches the flash, efficient and cuDNN kernels only.
CONTEXT_NEEDS_FUSED_ATTENTION = Rule(
    name="context_parallel_needs_fused_attention",
    reads=("context_parallel",),
    holds=lambda case: (
        (case.table.context_parallel == 1) | case.always(holds=case.job.flash_attention)
    ),
    says="context parallel {context_parallel} (--cp) in {target} (--target) needs a fused "
    "attention kernel (--attention flash)",
    given=("context_parallel", "target"),
    blames=("context_parallel",),
)

# What the native runtime alone is told; torchtitan does it by itself in pipelines.
NO_KEEPING = Rule(
    name="target_is_told_what_to_keep",
    reads=("keep_gathered",),
    holds=lambda case: case.table.keep_gathered == 0,
    says="{target} (--target) is not told to keep gathered weights (--keep-gathered); native is",
    given=("keep_gathered", "target"),
    blames=("keep_gathered",),
)
