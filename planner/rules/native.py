"""The native runtime (package `runtime`): what can be planned for it, and what it runs today.

Planning for the native target knows every axis: people ask what context or expert parallelism
would bring before this runtime executes it, and the published cases do too. `NATIVE_RUNS` says
what the runtime of this commit executes; `apply` and `search --runnable` ask `not_runnable`.
"""

from costmodels.layout import Layout, Schedule
from planner.rules.common import COMMON
from planner.rules.rule import Rule
from planner.rules.shapes import KV_HEADS_DIVIDE

# The passes cut key-value heads over the tensor axis and never copy them.
RULES: tuple[Rule, ...] = (*COMMON, KV_HEADS_DIVIDE)

# One line per feature; a feature that is missing here is planned but not yet executed.
NATIVE_RUNS = frozenset(
    {
        Schedule.GPIPE.value,
        Schedule.ONE_F_ONE_B.value,
        Schedule.INTERLEAVED.value,
    }
)


def features(layout: Layout) -> tuple[str, ...]:
    """Return the features that a layout needs of the runtime, by the names of the flags."""
    needed: list[str] = []
    if layout.pipeline_parallel > 1:
        needed.append(layout.schedule.value)
    if layout.context_parallel > 1:
        needed.append(f"context-parallel:{layout.context_parallel_type.value}")
    if layout.expert_parallel > 1:
        needed.append("expert-parallel")
    if layout.expert_tensor_parallel > 1:
        needed.append("expert-tensor-parallel")
    needed += [f"offload:{part.value}" for part in layout.offload]
    return tuple(needed)


def not_runnable(layout: Layout) -> tuple[str, ...]:
    """Return the features of a layout that the native runtime does not execute yet."""
    return tuple(name for name in features(layout) if name not in NATIVE_RUNS)
