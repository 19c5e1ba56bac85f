"""A module that a person names: `package.module:function`, called to build an `nn.Module`.

Weights are built without memory, so a model of any size can be described and cut. What the
constructor would have filled them with is recorded instead (`normal_(0, 0.02)`, `mul_(0.5)`, ...)
and drawn later, piece by piece, on the rank that holds the piece: a module begins with the values
its author meant, the same under every layout.
"""

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from planner.plan import Plan
from planner.presets import is_function_reference
from planner.rules.native_jobs import TRACED
from runtime.any_module.described import Description, describe
from runtime.any_module.recorded_values import RecordedValues, recorded_values
from runtime.any_module.recorder import recording
from runtime.capture.export import capture, weights_on_meta
from runtime.lower import compute_dtype, lower_captured, lower_graph
from runtime.models.same import differences


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModule:
    """A traced module without weights, and how to make these.

    Attributes:
        graph: From `capture`; lowering consumes it.
        warnings: What of its constructor cannot be followed.

    """

    name: str
    graph: GraphModule
    values: RecordedValues
    warnings: tuple[str, ...]

    def describe(self) -> Description:
        """Say what the planner needs to know of the module."""
        return describe(self.graph, self.name)


def build_module(
    reference: str,
    *,
    seed: int = 0,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> BuiltModule:
    """Import what a person named, call it and trace its module, without memory for weights.

    Args:
        reference: `package.module:function`; the current folder is looked through first.
        seed: Of the first values, those included that the constructor draws by itself.
        device: Where first values are made; the CPU if left out.
        dtype: Of the traced parameters; None keeps the module's.

    Raises:
        ValueError: There is no such function, it does not return a module, or that cannot be
            traced.

    """
    if not is_function_reference(reference):
        raise ValueError(f"{reference!r} is not of the form package.module:function")
    path, name = reference.split(":")
    function = _function(path, name)
    torch.manual_seed(seed)
    try:
        with weights_on_meta(), recording() as recorder:
            module = function()
    except Exception as error:  # the function is the user's, and so is whatever it raises
        raise ValueError(f"{reference} fails: {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        message = f"{reference} returns a {type(module).__name__}, not an nn.Module"
        raise ValueError(message)  # noqa: TRY004  # users' input, for one exit status
    values, lost = recorded_values(
        module, recorder, seed=seed, device=device or torch.device("cpu")
    )
    graph = capture(module, dtype=dtype)
    return BuiltModule(name=name, graph=graph, values=values, warnings=lost)


def check_reference(plan: Plan, reference: str | None) -> None:
    """Refuse a plan of a traced module without the function that builds it, and the reverse.

    Raises:
        ValueError: The plan is of a traced module and no function is named; or it is not, and one
            is.

    """
    is_traced = plan.model.architecture == TRACED
    if is_traced and reference is None:
        raise ValueError(
            f"the plan is of the module {plan.model.name}, which a plan cannot hold: name the "
            "function that builds it (--model package.module:function)"
        )
    if reference is not None and not is_traced:
        raise ValueError(f"the plan is of {plan.model.name}, not of a module: leave --model out")


def module_of_plan(
    plan: Plan, reference: str | None, *, seed: int = 0, device: torch.device | None = None
) -> BuiltModule | None:
    """Build the module that a plan was made for, traced in the dtype that the plan computes in.

    Args:
        plan: What to run.
        reference: `package.module:function` where the plan is of a traced module.
        seed: Of the first values.
        device: Where first values are made; the CPU if left out.

    Returns:
        None where the plan is of a known family.

    Raises:
        ValueError: `check_reference` refuses, there is no such function, or it builds another
            module than the plan's.

    """
    check_reference(plan, reference)
    if reference is None:
        return None
    built = build_module(reference, seed=seed, device=device, dtype=compute_dtype(plan.job))
    found = differences(built.describe().spec, plan.model)
    if found:
        raise ValueError(f"{reference} is not the plan's module: {found}")
    return built


def lowered_plan(
    plan: Plan, built: BuiltModule | None, *, capacity_factor: float = 0.0
) -> GraphModule:
    """Return a plan's model after all passes; the same on every rank.

    Args:
        plan: What to run.
        built: From `module_of_plan`; its graph is consumed.
        capacity_factor: What an expert takes of a sequence, over the mean; 0 takes all.

    Raises:
        ValueError: The model cannot be traced, cut or split as the layout asks.

    """
    job, layout = plan.job, plan.layout
    if built is None:
        return lower_graph(plan.model, job, layout, capacity_factor=capacity_factor)
    return lower_captured(built.graph, job, layout, capacity_factor=capacity_factor)


def _function(path: str, name: str) -> Any:  # noqa: ANN401  (a user's function)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(path)
    except Exception as error:  # importing runs the user's code
        raise ValueError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{path} has no function {name!r}")  # noqa: TRY004  # users' input
    return function
