"""What the configuration of a framework can say: what `apply` writes and `search` may offer.

The tables of the targets say what a framework runs; some of that is set up in a program's code and
has no option (DeepSpeed's pipelines), or is the framework's own choice (nanotron's split). A
measured run may have it and `estimate` judges it; a plan that is to be applied may not. The
emitters (`planner/emit`) refuse the same things by name, with the remedy. For our own runtime the
question is what it executes (`native.RUNTIME_RULES`).
"""

from collections.abc import Callable

import numpy as np

from costmodels.job import Optimizer, Target
from costmodels.layout import AXES, Recompute
from costmodels.layout_table import RECOMPUTES
from planner.rules.accelerate import by_deepspeed
from planner.rules.native import RUNTIME_RULES
from planner.rules.rule import CUTS_GRADIENTS, CUTS_PARAMETERS, Case, Mask, Rule

SELECTIVE, FULL = RECOMPUTES.index(Recompute.SELECTIVE), RECOMPUTES.index(Recompute.FULL)

# Targets that recompute every layer of every stage, or none.
ALL_OR_NONE = frozenset({Target.TORCHTITAN, Target.DEEPSPEED, Target.NANOTRON, Target.ACCELERATE})


def _says(
    name: str,
    what: str,
    reads: tuple[str, ...],
    holds: Callable[[Case], Mask],
    *blames: str,
) -> Rule:
    """Return a rule that names what a target's configuration has no option for."""
    return Rule(
        name=f"configuration_has_{name}",
        reads=reads,
        holds=lambda case: np.asarray(holds(case), dtype=np.bool_),
        says="the configuration of {target} (--target) cannot say " + what,
        given=(*reads, "target"),
        blames=blames or reads[:1],
    )


def _shards(case: Case) -> Mask:
    return np.asarray(case.table.data_parallel * case.table.context_parallel)


def _orders(*known: tuple[str, ...]) -> Rule:
    def holds(case: Case) -> Mask:
        codes = [code for code, order in enumerate(case.table.rank_orders) if order in known]
        return np.isin(case.table.rank_order, codes)

    return _says("rank_order", "the rank order {rank_order}", ("rank_order",), holds)


USUAL_ORDER = _orders(AXES)
WHOLE_GROUPS = _says(
    "zero_groups",
    "ZeRO in groups of {zero_group} of {zero_ranks} ranks",
    ("zero_group", "zero_stage", "data_parallel", "context_parallel"),
    lambda case: (case.table.zero_stage == 0) | (case.table.zero_group >= _shards(case)),
)
GROUPS_HOLD_CONTEXT = _says(
    "zero_groups_of_context",
    "a ZeRO group of {zero_group} with context parallel {context_parallel}",
    ("zero_group", "zero_stage", "context_parallel"),
    lambda case: (
        (case.table.zero_stage < CUTS_GRADIENTS)
        | (case.table.zero_group % case.table.context_parallel == 0)
    ),
)
NO_EXPERT_GROUPS = _says(
    "expert_groups",
    "expert parallel {expert_parallel} x expert tensor parallel {expert_tensor_parallel}",
    ("expert_parallel", "expert_tensor_parallel"),
    lambda case: case.table.expert_parallel * case.table.expert_tensor_parallel == 1,
)

NANOTRON = (NO_EXPERT_GROUPS, USUAL_ORDER, WHOLE_GROUPS)

DEEPSPEED = (
    _says(
        "pipeline",
        "a pipeline of {pipeline_parallel} (--pp): PipelineModule makes it in code",
        ("pipeline_parallel",),
        lambda case: case.table.pipeline_parallel == 1,
    ),
    NO_EXPERT_GROUPS,
    _says(
        "sequence_parallelism",
        "tensor parallel {tensor_parallel} with sequence parallelism",
        ("sequence_parallel", "tensor_parallel"),
        lambda case: ~case.splits_sequence_by_tensor,
    ),
    _says(
        "tensor_and_context",
        "tensor parallel {tensor_parallel} (AutoTP) with context parallel {context_parallel}",
        ("tensor_parallel", "context_parallel"),
        lambda case: (case.table.tensor_parallel == 1) | (case.table.context_parallel == 1),
    ),
    _says(
        "tensor_and_zero_3",
        "tensor parallel {tensor_parallel} (AutoTP) with ZeRO-{zero_stage}",
        ("zero_stage", "tensor_parallel"),
        lambda case: (case.table.tensor_parallel == 1) | (case.table.zero_stage < CUTS_PARAMETERS),
    ),
    _says(
        "selective_recomputation",
        "selective recomputation, which belongs to the model",
        ("recompute",),
        lambda case: case.table.recompute != SELECTIVE,
    ),
    USUAL_ORDER,
    WHOLE_GROUPS,
)


_ENGINE = (
    "zero_stage",
    "context_parallel",
    "context_parallel_type",
    "offload_optimizer",
    "offload_parameters",
)
ACCELERATE = (
    USUAL_ORDER,
    _says(
        "tensor_under_deepspeed",
        "tensor parallel {tensor_parallel} under DeepSpeed's ZeRO-{zero_stage}",
        (*_ENGINE, "tensor_parallel"),
        lambda case: ~by_deepspeed(case) | (case.table.tensor_parallel == 1),
    ),
    _says(
        "zero_groups_under_deepspeed",
        "a ZeRO group of {zero_group} under DeepSpeed's ZeRO",
        (*_ENGINE, "zero_group", "data_parallel"),
        lambda case: (
            ~by_deepspeed(case)
            | (case.table.zero_stage == 0)
            | (case.table.zero_group >= _shards(case))
        ),
    ),
    GROUPS_HOLD_CONTEXT,
)

TORCHTITAN = (
    USUAL_ORDER,
    _says(
        "pipeline_of_qwen3",
        "a pipeline of {model}: torchtitan's Qwen3 has none",
        ("pipeline_parallel",),
        lambda case: (
            (case.table.pipeline_parallel == 1)
            | case.always(holds=not case.model.architecture.startswith("qwen3"))
        ),
    ),
    _says(
        "replicas_beside_an_axis",
        "whole parameters (--zero 0) beside another axis",
        (
            "zero_stage",
            "data_parallel",
            "tensor_parallel",
            "pipeline_parallel",
            "context_parallel",
        ),
        lambda case: (
            (case.table.zero_stage > 0)
            | (
                (case.table.context_parallel == 1)
                & (
                    (case.table.data_parallel == 1)
                    | (case.table.tensor_parallel * case.table.pipeline_parallel == 1)
                )
            )
        ),
    ),
    GROUPS_HOLD_CONTEXT,
    _says(
        "tensor_without_sequence",
        "tensor parallel {tensor_parallel} without sequence parallelism",
        ("sequence_parallel", "tensor_parallel"),
        lambda case: (case.table.tensor_parallel == 1) | case.splits_sequence_by_tensor,
    ),
)

MEGATRON = (
    _orders(AXES, ("tp", "cp", "pp", "dp")),
    _says(
        "offload_without_zero",
        "an offloaded optimizer that is not sharded (--zero 0)",
        ("zero_stage", "offload_optimizer"),
        lambda case: (case.table.zero_stage > 0) | (case.table.offload_optimizer == 0),
    ),
    _says(
        "moments_without_zero",
        "8-bit moments that are not sharded (--zero 0)",
        ("zero_stage",),
        lambda case: (
            (case.table.zero_stage > 0)
            | case.always(holds=case.job.optimizer is not Optimizer.ADAMW_8BIT)
        ),
    ),
    _says(
        "graphs_with_recomputation",
        "CUDA graphs with full recomputation",
        ("recompute",),
        lambda case: (
            (case.table.recompute != FULL) | case.always(holds=not case.job.switches.cuda_graphs)
        ),
    ),
)


def expressible_rules(target: Target) -> tuple[Rule, ...]:
    """Return what a plan for a target must obey besides the target's table, to be applied."""
    return {
        Target.NATIVE: RUNTIME_RULES,
        Target.MEGATRON: MEGATRON,
        Target.TORCHTITAN: TORCHTITAN,
        Target.DEEPSPEED: DEEPSPEED,
        Target.NANOTRON: NANOTRON,
        Target.ACCELERATE: ACCELERATE,
    }[target]
