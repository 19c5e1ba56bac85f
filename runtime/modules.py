"""A module that a person names: `package.module:function`, called to build an `nn.Module`.

Weights are built without memory, so a model of any size can be described and cut. What the
constructor would have filled them with is recorded instead (`normal_(0, 0.02)`, `mul_(0.5)`, ...)
and drawn later, piece by piece, on the rank that holds the piece: a module begins with the values
its author meant, the same under every layout.
"""

import importlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from planner.plan import Plan
from planner.rules.native_jobs import TRACED
from runtime.capture import capture, weights_on_meta
from runtime.described import Description, describe
from runtime.initialise import drawn, whole_places
from runtime.mesh import Mesh
from runtime.models.same import differences
from runtime.program import ParameterShard

_aten = torch.ops.aten
_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
# In-place operations on single elements: they mean the same on any part of a tensor.
_DRAWS = frozenset({_aten.normal_.default, _aten.uniform_.default})
_FILLS = frozenset(
    {
        _aten.fill_.Scalar,
        _aten.zero_.default,
        _aten.mul_.Tensor,
        _aten.mul_.Scalar,
        _aten.add_.Tensor,
        _aten.add_.Scalar,
        _aten.div_.Tensor,
        _aten.div_.Scalar,
        _aten.erfinv_.default,
        _aten.clamp_.default,
    }
)


@dataclass(frozen=True, slots=True)
class _Step:
    """One in-place operation on a parameter: which, and with what besides the tensor."""

    operation: Any
    arguments: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...]

    def run(self, rows: Tensor, generator: Generator) -> None:
        """Do it to a part."""
        named = dict(self.named)
        if self.operation in _DRAWS:
            named["generator"] = generator
        self.operation(rows, *self.arguments, **named)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Writes down what is done in place to tensors on the meta device, by their storage."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.steps: dict[int, list[_Step]] = {}
        self.unknown: dict[int, str] = {}

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401  (whatever torch dispatches)
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        del types
        result = func(*args, **(kwargs or {}))
        target = args[0] if args else None
        if isinstance(target, Tensor) and target.is_meta and func._schema.is_mutable:  # noqa: SLF001  (torch's own way to ask)
            self._note(func, target, args[1:], dict(kwargs or {}))
        return result

    def _note(
        self,
        func: Any,  # noqa: ANN401
        target: Tensor,
        arguments: tuple[Any, ...],
        named: dict[str, Any],
    ) -> None:
        storage = target.untyped_storage()
        is_whole = target.numel() * target.element_size() == storage.nbytes()
        plain = all(not isinstance(value, Tensor) for value in (*arguments, *named.values()))
        named.pop("generator", None)
        if func in _DRAWS | _FILLS and is_whole and plain:
            step = _Step(func, arguments, tuple(named.items()))
            self.steps.setdefault(storage._cdata, []).append(step)  # noqa: SLF001  (a storage's identity)
        else:
            self.unknown[storage._cdata] = func.__name__  # noqa: SLF001


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedValues:
    """First values of a module's parameters: what its constructor does to them, or has made.

    Attributes:
        steps: By parameter, what was done in place to fresh memory.
        made: Values that the constructor computed, of parameters that did not begin empty.

    """

    seed: int
    device: torch.device
    steps: Mapping[str, tuple[_Step, ...]]
    made: Mapping[str, Tensor]

    def __call__(self, shard: ParameterShard) -> Tensor:
        """Return a whole parameter."""
        made = self.made.get(shard.name)
        return made if made is not None else self._draw(shard, whole_places(shard))

    def piece(self, shard: ParameterShard, mesh: Mesh) -> Tensor:
        """Return a rank's piece of a parameter."""
        made = self.made.get(shard.name)
        if made is not None:
            return shard.of_rank(made, mesh).clone()
        return self._draw(shard, shard.places(mesh))

    def _draw(self, shard: ParameterShard, places: tuple[Tensor, ...]) -> Tensor:
        def fill(rows: Tensor, generator: Generator) -> None:
            rows.zero_()
            for step in self.steps.get(shard.name, ()):
                step.run(rows, generator)

        return drawn(shard, places, fill, seed=self.seed, device=self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModule:
    """A module without weights, and how to make these.

    Attributes:
        warnings: What of its constructor cannot be followed.

    """

    name: str
    module: nn.Module
    values: RecordedValues
    warnings: tuple[str, ...]

    def describe(self) -> Description:
        """Trace the module and say what the planner needs to know of it."""
        return describe(capture(self.module), self.name)


def build_module(
    reference: str, *, seed: int = 0, device: torch.device | None = None
) -> BuiltModule:
    """Import what a person named, call it and take its module, without memory for weights.

    Args:
        reference: `package.module:function`; the current folder is looked through first.
        seed: Of the first values, those included that the constructor draws by itself.
        device: Where first values are made; the CPU if left out.

    Raises:
        ValueError: There is no such function, or it does not return a module.

    """
    if not _REFERENCE.fullmatch(reference):
        raise ValueError(f"{reference!r} is not of the form package.module:function")
    path, name = reference.split(":")
    function = _function(path, name)
    torch.manual_seed(seed)
    recorder = _Recorder()
    try:
        with weights_on_meta(), recorder:
            module = function()
    except Exception as error:  # the function is the user's, and so is whatever it raises
        raise ValueError(f"{reference} fails: {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        message = f"{reference} returns a {type(module).__name__}, not an nn.Module"
        raise ValueError(message)  # noqa: TRY004  # users' input, for one exit status
    steps, made, lost = {}, {}, []
    for key, parameter in module.named_parameters():
        if not parameter.is_meta:
            made[key] = parameter.detach().clone()
            continue
        storage = parameter.untyped_storage()._cdata  # noqa: SLF001  (a storage's identity)
        steps[key] = tuple(recorder.steps.get(storage, ()))
        if storage in recorder.unknown:
            lost.append(f"{key}: {recorder.unknown[storage]} of its first values is left out")
    values = RecordedValues(seed=seed, device=device or torch.device("cpu"), steps=steps, made=made)
    return BuiltModule(name=name, module=module, values=values, warnings=tuple(lost))


def needs_module(plan: Plan, reference: str | None) -> bool:
    """Tell whether a plan is of a traced module.

    Raises:
        ValueError: It is, and no function is named; or it is not, and one is.

    """
    is_traced = plan.model.architecture == TRACED
    if is_traced and reference is None:
        raise ValueError(
            f"the plan is of the module {plan.model.name}, which a plan cannot hold: name the "
            "function that builds it (--model package.module:function)"
        )
    if reference is not None and not is_traced:
        raise ValueError(f"the plan is of {plan.model.name}, not of a module: leave --model out")
    return is_traced


def module_of_plan(
    plan: Plan, reference: str, *, seed: int = 0, device: torch.device | None = None
) -> BuiltModule:
    """Build the module that a plan was made for.

    Raises:
        ValueError: There is no such function, or it builds another module than the plan's.

    """
    built = build_module(reference, seed=seed, device=device)
    found = differences(built.describe().spec, plan.model)
    if found:
        raise ValueError(f"{reference} is not the plan's module: {found}")
    return built


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
