"""Plans as the configuration of other frameworks: pure text, one module per target.

`emit` judges the layout by the target's own rules first, then asks the target's module. What a
framework has no option for is refused by name (`CannotExpress`), never left out. Our own runtime
(`native`) runs the plan file itself and so takes a whole `Plan`.
"""

from collections.abc import Callable
from dataclasses import replace

from costmodels.hardware import Cluster
from costmodels.job import Target, TrainingJob
from costmodels.layout import Layout
from costmodels.model import ModelSpec
from planner.emit.accelerate import emit_accelerate
from planner.emit.deepspeed import emit_deepspeed
from planner.emit.emission import (
    CannotExpress,
    Emission,
    EmittedFile,
    IllegalPlanError,
    PlanLike,
    Variable,
)
from planner.emit.megatron import emit_megatron
from planner.emit.nanotron import emit_nanotron
from planner.emit.native import emit_native
from planner.emit.torchtitan import emit_torchtitan
from planner.plan import Plan
from planner.rules import violations
from planner.rules.native_jobs import TRACED

__all__ = [
    "CannotExpress",
    "Emission",
    "EmittedFile",
    "IllegalPlanError",
    "PlanLike",
    "Variable",
    "emit",
]

Emitter = Callable[[ModelSpec, TrainingJob, Cluster, Layout], Emission]

EMITTERS: dict[Target, Emitter] = {
    Target.MEGATRON: emit_megatron,
    Target.TORCHTITAN: emit_torchtitan,
    Target.DEEPSPEED: emit_deepspeed,
    Target.NANOTRON: emit_nanotron,
    Target.ACCELERATE: emit_accelerate,
}


def emit(plan: PlanLike, target: Target, module: str | None = None) -> Emission:
    """Write a plan for a framework.

    Args:
        plan: Model, job, cluster and layout.
        target: The framework; need not be the one that the plan was searched for.
        module: `package.module:function` that builds the network of a traced module; our own
            runtime alone calls it.

    Raises:
        CannotExpress: The framework has no option for a part of the plan.
        IllegalPlanError: The layout breaks a rule of the framework.
        ValueError: Our own runtime does not run the job, or was given no whole plan.

    """
    job = replace(plan.job, target=target)
    if target is Target.NATIVE:
        if not isinstance(plan, Plan):
            raise ValueError("native runs a whole plan: model, job, cluster and layout do not do")
        return emit_native(replace(plan, job=job), module)
    if plan.model.architecture == TRACED:
        raise CannotExpress(target, f"the module {plan.model.name}", "use --target native")
    broken = violations(plan.model, job, plan.cluster, plan.layout)
    if broken:
        reasons = "; ".join(violation.message for violation in broken)
        raise IllegalPlanError(f"the plan is illegal for {target.value}: {reasons}")
    return EMITTERS[target](plan.model, job, plan.cluster, plan.layout)
