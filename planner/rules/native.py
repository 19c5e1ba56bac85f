"""The native runtime (package `runtime`): what can be planned for it, and what it runs today.

Planning for the native target knows every axis: people ask what context or expert parallelism
would bring before this runtime executes it, and the published cases do too. `NATIVE_RUNS` says
what the runtime of this commit executes; `RUNTIME_SUPPORTS` is the rule that `apply` and
`search --runnable` add.
"""

from functools import reduce

import numpy as np

from costmodels.layout import Offload, Schedule
from costmodels.layout_table import CONTEXT_PARALLEL_TYPES, SCHEDULES
from planner.rules.common import COMMON
from planner.rules.rule import Case, Mask, Rule
from planner.rules.shapes import KV_HEADS_DIVIDE

# The passes cut key-value heads over the tensor axis and never copy them.
RULES: tuple[Rule, ...] = (*COMMON, KV_HEADS_DIVIDE)

# One line per feature; a feature that is missing here is planned but not yet executed. Names:
# schedules as on the command line, "cp:" and a type, "ep", "etp", "offload:" and a part.
NATIVE_RUNS = frozenset(
    {
        Schedule.GPIPE.value,
        Schedule.ONE_F_ONE_B.value,
        Schedule.INTERLEAVED.value,
        Schedule.ZERO_BUBBLE.value,
        Schedule.ZBV.value,
        Schedule.DUALPIPEV.value,
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
