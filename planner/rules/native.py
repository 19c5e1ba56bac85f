"""The native runtime (package `runtime`): what can be planned for it, and what it runs today.

Planning for the native target knows more than the runtime executes: people ask what a layout would
bring before this runtime has it. `RULES` say what can be planned; `RUNTIME_RULES` what else a plan
must obey to run, which `search` and `apply` add.
"""

import numpy as np

from planner.rules.common import COMMON
from planner.rules.rule import CUTS_GRADIENTS, Case, Mask, Rule
from planner.rules.shapes import KV_HEADS_DIVIDE, ULYSSES


def _tokens_divide(case: Case) -> Mask:
    table = case.table
    tokens = case.job.seq_len // table.context_parallel
    divides = tokens % table.tensor_parallel == 0
    return np.asarray(divides | (case.model.moe is None), dtype=np.bool_)


def _states_divide(case: Case) -> Mask:
    table = case.table
    group = table.zero_group * table.tensor_parallel
    experts = table.expert_parallel * table.expert_tensor_parallel
    divides = (group % experts == 0) | (experts % group == 0)
    return np.asarray(divides | (table.zero_stage == 0), dtype=np.bool_)


# Each tensor rank routes an equal part of the tokens, with or without sequence parallelism.
EXPERT_TOKENS_DIVIDE = Rule(
    name="tensor_parallel_divides_routed_tokens",
    reads=("tensor_parallel", "context_parallel"),
    holds=_tokens_divide,
    says="tensor parallel {tensor_parallel} (--tp) does not divide the tokens of a sequence of "
    "{seq_len} on context parallel {context_parallel}, of which each rank routes a part to experts",
    given=("tensor_parallel", "context_parallel", "seq_len"),
    blames=("tensor_parallel",),
)


def _expert_gradients_come_whole(case: Case) -> Mask:
    table = case.table
    cuts = table.zero_stage >= CUTS_GRADIENTS
    return np.asarray(~(cuts & table.puts_off) | (case.model.moe is None), dtype=np.bool_)


# Only linear layers put their weights' gradients off: those of experts come with the first half of
# a backward pass and wait, whole, for the second, when all of a layer are reduced together.
EXPERT_GRADIENTS_WAIT = Rule(
    name="expert_gradients_are_cut_at_once",
    reads=("zero_stage", "schedule", "pipeline_parallel"),
    holds=_expert_gradients_come_whole,
    says="schedule {schedule} (--schedule) splits backwards, between whose halves the native "
    "runtime keeps whole gradients of experts, which ZeRO-{zero_stage} (--zero) is to cut",
    given=("schedule", "zero_stage"),
    blames=("schedule", "zero_stage"),
)
# A state of experts is cut over the ranks of a ZeRO group that hold the same experts.
EXPERT_STATES_DIVIDE = Rule(
    name="zero_group_divides_by_experts",
    reads=(
        "zero_stage",
        "zero_group",
        "tensor_parallel",
        "expert_parallel",
        "expert_tensor_parallel",
    ),
    holds=_states_divide,
    says="a ZeRO group of {zero_group} (--zero-group) x tp {tensor_parallel} ranks is no multiple "
    "and no divisor of expert parallel {expert_parallel} x expert tensor parallel "
    "{expert_tensor_parallel}, so that copies of experts do not cut evenly",
    given=("zero_group", "tensor_parallel", "expert_parallel", "expert_tensor_parallel"),
    blames=("zero_group", "expert_parallel"),
)

# The passes cut key-value heads over the tensor axis and never copy them.
RULES: tuple[Rule, ...] = (
    *COMMON,
    KV_HEADS_DIVIDE,
    EXPERT_TOKENS_DIVIDE,
    EXPERT_STATES_DIVIDE,
    EXPERT_GRADIENTS_WAIT,
)


def _merged_attention_is_flash(case: Case) -> Mask:
    table = case.table
    merges = (table.context_parallel > 1) & (table.context_parallel_type != ULYSSES)
    return np.asarray(case.job.flash_attention | ~merges, dtype=np.bool_)


# Planned, but not executed yet: one rule per thing that the runtime lacks. Rings and gathers merge
# parts of attention by the log-sum-exp that flash kernels return.
RUNTIME_RULES: tuple[Rule, ...] = (
    Rule(
        name="merged_attention_is_flash",
        reads=("context_parallel", "context_parallel_type"),
        holds=_merged_attention_is_flash,
        says="the native runtime does not run {context_parallel_type} context parallelism "
        "(--cp-type) over {context_parallel} ranks (--cp) without flash attention, whose kernel "
        "returns what merging needs",
        given=("context_parallel", "context_parallel_type"),
        blames=("context_parallel_type", "context_parallel"),
    ),
)
