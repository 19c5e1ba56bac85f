"""What a module's constructor does to weights that have no memory yet.

Every operation on the meta device is seen. What is done to fresh memory is written down by storage
(`normal_(0, 0.02)`, `mul_(0.5)`, ...) and follows the values: into copies (`copy.deepcopy` of a
block, a change of dtype), and through scalings that are not in place (`fresh.normal_() * 0.1`).

What is not done element by element cannot be done to a piece; it is named instead.
"""

# ruff: noqa: ANN401  (a mode sees any operation with any arguments)

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_aten = torch.ops.aten

# In-place operations on single elements: they mean the same on any part of a tensor.
_DRAWS = frozenset({_aten.normal_.default, _aten.uniform_.default, nn.init.trunc_normal_})
_FILLS = frozenset({_aten.fill_.Scalar, _aten.zero_.default})
_CHANGES = frozenset(
    {
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
# With a number in place of a tensor without dimensions, which may change later.
_WITH_A_NUMBER: Mapping[Any, Any] = {
    _aten.fill_.Tensor: _aten.fill_.Scalar,
    _aten.copy_.default: _aten.fill_.Scalar,
}
_COMMUTES = frozenset({_aten.mul.Tensor, _aten.add.Tensor})
# What makes other memory of the same values, and the change that is made on the way.
_COPIES: Mapping[Any, Any] = {
    _aten.clone.default: None,
    _aten._to_copy.default: None,  # noqa: SLF001  (what a change of dtype is)
    _aten.mul.Tensor: _aten.mul_.Tensor,
    _aten.mul.Scalar: _aten.mul_.Scalar,
    _aten.add.Tensor: _aten.add_.Tensor,
    _aten.add.Scalar: _aten.add_.Scalar,
    _aten.div.Tensor: _aten.div_.Tensor,
    _aten.div.Scalar: _aten.div_.Scalar,
}
# Functions of torch.nn.init that do nothing to tensors without memory, and that no piece can do.
_SILENT = ("orthogonal_", "sparse_", "dirac_")


@dataclass(frozen=True, slots=True)
class Step:
    """One in-place operation on a parameter: which, and with what besides the tensor."""

    operation: Any
    arguments: tuple[Any, ...] = ()
    named: tuple[tuple[str, Any], ...] = ()

    def run(self, rows: Tensor, generator: Generator) -> None:
        """Do it to a part."""
        named = dict(self.named)
        if self.operation in _DRAWS:
            named["generator"] = generator
        self.operation(rows, *self.arguments, **named)


# What fresh memory is filled with, by the function that makes it.
_FRESH: Mapping[Any, tuple[Step, ...]] = {
    **dict.fromkeys((_aten.empty_like, _aten.new_empty, _aten.new_empty_strided), ()),
    **dict.fromkeys((_aten.zeros, _aten.zeros_like, _aten.new_zeros), (Step(_aten.zero_.default),)),
    **dict.fromkeys(
        (_aten.ones, _aten.ones_like, _aten.new_ones), (Step(_aten.fill_.Scalar, (1.0,)),)
    ),
    **dict.fromkeys((_aten.randn, _aten.randn_like), (Step(_aten.normal_.default),)),
    **dict.fromkeys((_aten.rand, _aten.rand_like), (Step(_aten.uniform_.default),)),
}
_FULL: Mapping[Any, int] = {
    _aten.full: 1,
    _aten.full_like: 1,
    _aten.new_full: 2,
}  # the value's place


@dataclass(slots=True)
class _Memory:
    """What was done to a storage, which is kept alive: its address would be used again.

    Attributes:
        unknown: An operation that cannot be done to a piece.

    """

    storage: torch.UntypedStorage
    steps: list[Step] = field(default_factory=list)
    unknown: str = ""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Writes down what is done to tensors on the meta device, by their storage."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._memories: dict[int, _Memory] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do the operation, and write down what it changed or made."""
        del types
        named = dict(kwargs or {})
        result = func(*args, **named)
        written = _written(func, args, named)
        if written:
            self._note(func, written, args, named)
        else:
            self._follow(func, result, args, named)
        return result

    def memory(self, tensor: Tensor) -> tuple[tuple[Step, ...], str]:
        """Return what was done to a tensor's storage, and what of it cannot be done to a piece."""
        known = self._memories.get(_identity(tensor))
        return (tuple(known.steps), known.unknown) if known is not None else ((), "")

    def note(self, operation: Any, target: Tensor, arguments: tuple[Any, ...]) -> None:
        """Write down what torch does not do to a tensor without memory."""
        self._note(operation, [target], (target, *arguments), {})

    def _note(
        self, func: Any, written: list[Tensor], args: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        target, *others = written
        named.pop("generator", None)
        args, named = tree_map(_number, (args, named))
        operands = _tensors((args[1:], named))
        if not operands and func in _WITH_A_NUMBER:
            func, args = _WITH_A_NUMBER[func], args[:2]
        if func is _aten.copy_.default and _is_whole(target) and _fills(operands, target):
            self._copy(target, operands[0])
        elif (
            func in _DRAWS | _FILLS | _CHANGES and _is_whole(target) and not operands and not others
        ):
            memory = self._of(target)
            if func not in _CHANGES:  # what was there before is gone
                memory.steps, memory.unknown = [], ""
            memory.steps.append(Step(func, args[1:], tuple(named.items())))
        else:
            for tensor in written:
                self._of(tensor).unknown = func.__name__

    def _follow(self, func: Any, result: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Write down what other memory is made of."""
        sources = [tensor for tensor in _tensors((args, named)) if tensor.is_meta]
        read = {_identity(tensor) for tensor in sources}
        known = [self._memories[key] for key in read if key in self._memories]
        args = tree_map(_number, args)
        if func in _COMMUTES and len(args) > 1 and not named and not isinstance(args[0], Tensor):
            args = args[1::-1]
        packet = func.overloadpacket
        for made in _tensors(result):
            if not made.is_meta or _identity(made) in read:
                continue
            if packet in _FRESH or packet in _FULL:
                place = _FULL.get(packet)
                value = () if place is None else (Step(_aten.fill_.Scalar, (args[place],)),)
                self._of(made).steps = [*_FRESH.get(packet, value)]
            elif known and func in _COPIES and len(sources) == 1 and sources[0] is args[0]:
                self._copy(made, args[0])
                if _COPIES[func] is not None:
                    step = Step(_COPIES[func], args[1:], tuple(named.items()))
                    self._of(made).steps.append(step)
            elif known:
                lost = next((memory.unknown for memory in known if memory.unknown), func.__name__)
                self._of(made).unknown = lost

    def _of(self, tensor: Tensor) -> _Memory:
        return self._memories.setdefault(_identity(tensor), _Memory(tensor.untyped_storage()))

    def _copy(self, target: Tensor, source: Tensor) -> None:
        steps, unknown = self.memory(source)
        memory = self._of(target)
        memory.steps, memory.unknown = [*steps], unknown


@contextmanager
def recording() -> Iterator[Recorder]:
    """Write down what is done to weights without memory inside of the block."""
    recorder = Recorder()
    changed = {name: getattr(nn.init, name) for name in ("_no_grad_trunc_normal_", *_SILENT)}

    def truncated(  # noqa: PLR0917  (as torch calls it)
        tensor: Tensor,
        mean: float,
        std: float,
        a: float,
        b: float,
        generator: Generator | None = None,
    ) -> Tensor:
        if not tensor.is_meta:
            drawn: Tensor = changed["_no_grad_trunc_normal_"](tensor, mean, std, a, b, generator)
            return drawn
        recorder.note(nn.init.trunc_normal_, tensor, (mean, std, a, b))
        return tensor

    def silent(name: str) -> Any:
        def noted(tensor: Tensor, *args: Any, **named: Any) -> Tensor:
            if tensor.is_meta:
                recorder.note(changed[name], tensor, args)
            filled: Tensor = changed[name](tensor, *args, **named)
            return filled

        return noted

    # No mode sees these: they return before they call anything.
    nn.init._no_grad_trunc_normal_ = truncated
    try:
        for name in _SILENT:
            setattr(nn.init, name, silent(name))
        with recorder:
            yield recorder
    finally:
        for name, function in changed.items():
            setattr(nn.init, name, function)


def _written(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors without memory that an operation changes."""
    written: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):  # noqa: SLF001  (torch's own way to ask)
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else named.get(argument.name)
            written += [tensor for tensor in _tensors(value) if tensor.is_meta]
    return written


def _tensors(values: Any) -> list[Tensor]:
    leaves: Iterable[Any] = tree_leaves(values)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _number(value: Any) -> Any:
    """Return the number that a tensor without dimensions holds, and anything else as it is."""
    is_number = isinstance(value, Tensor) and not value.dim() and not value.is_meta
    return value.item() if is_number else value


def _identity(tensor: Tensor) -> int:
    storage: int = tensor.untyped_storage()._cdata  # noqa: SLF001  (a storage's identity)
    return storage


def _is_whole(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _fills(operands: list[Tensor], target: Tensor) -> bool:
    return len(operands) == 1 and operands[0].is_meta and operands[0].shape == target.shape
