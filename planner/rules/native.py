"""The native runtime (package `runtime`): what can be planned for it, and what it runs today.

Planning for the native target knows every axis: people ask what context or expert parallelism
would bring before this runtime executes it, and the published cases do too. `NATIVE_RUNS` says
what the runtime of this commit executes; `RUNTIME_SUPPORTS` is the rule that `apply` and
`search --runnable` add.
"""

from functools import reduce

import numpy as np

from costmodels.layout import ContextParallelType, Offload, Schedule
from costmodels.layout_table import CONTEXT_PARALLEL_TYPES, SCHEDULES
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

# One line per feature; a feature that is missing here is planned but not yet executed. Names:
# schedules as on the command line, "cp:" and a type, "cp-unfused" (a ring or a gather without flash
# attention, whose kernel returns what merging needs), "ep", "etp", "offload:" and a part.
NATIVE_RUNS = frozenset(
    {
        Schedule.GPIPE.value,
        Schedule.ONE_F_ONE_B.value,
        Schedule.INTERLEAVED.value,
        Schedule.ZERO_BUBBLE.value,
        Schedule.ZBV.value,
        Schedule.DUALPIPEV.value,
        *(f"cp:{kind.value}" for kind in ContextParallelType),
        "ep",
        "etp",
        *(f"offload:{part.value}" for part in Offload),
    }
)


def features(case: Case) -> dict[str, Mask]:
    """Return, for each feature of the runtime, which layouts need it."""
    table = case.table
    needs: dict[str, Mask] = {}
    for code, schedule in enumerate(SCHEDULES):
        needs[schedule.value] = (table.pipeline_parallel > 1) & (table.schedule == code)
    for code, kind in enumerate(CONTEXT_PARALLEL_TYPES):
        uses = table.context_parallel_type == code
        needs[f"cp:{kind.value}"] = (table.context_parallel > 1) & uses
    merges = (table.context_parallel > 1) & (table.context_parallel_type != ULYSSES)
    needs["cp-unfused"] = merges & (not case.job.flash_attention)
    needs["ep"] = table.expert_parallel > 1
    needs["etp"] = table.expert_tensor_parallel > 1
    for part in Offload:
        needs[f"offload:{part.value}"] = getattr(table, f"offload_{part.value}") > 0
    return needs


def _runs(case: Case) -> Mask:
    missing = [needed for name, needed in features(case).items() if name not in NATIVE_RUNS]
    return ~reduce(np.logical_or, missing, case.always(holds=False))


RUNTIME_SUPPORTS = Rule(
    name="native_runtime_supports",
    reads=(
        "pipeline_parallel",
        "schedule",
        "context_parallel",
        "context_parallel_type",
        "expert_parallel",
        "expert_tensor_parallel",
        "offload_optimizer",
        "offload_parameters",
        "offload_activations",
    ),
    holds=_runs,
    says="the native runtime does not run this layout yet: schedule {schedule} on {num_stages} "
    "stages, context parallel {context_parallel} ({context_parallel_type}), expert parallel "
    "{expert_parallel} x {expert_tensor_parallel}, offload {offload}; it runs "
    + ", ".join(sorted(NATIVE_RUNS)),
    given=("schedule", "context_parallel", "expert_parallel", "offload"),
    blames=("schedule", "context_parallel", "expert_parallel", "offload"),
)
