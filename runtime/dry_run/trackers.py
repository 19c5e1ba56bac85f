"""What a run does, read off below autograd: FLOPs, bytes on the wire, live storage.

A `Tracker` sees every operator that reaches a kernel, forward, backward and optimizer alike, on
real tensors or on fake ones. It shares no formula with the cost model:

    FLOPs     2 m n k of each matrix product; attention by its own kernel, which computes two
              products forward and five backward over half of the square where causal
    bytes     of collectives, by the ranks that take part (see `Message`)
    storage   each storage once, from the operator that made it until nothing refers to it, in
              the 512-byte blocks of CUDA's caching allocator; none in host memory
"""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runtime.ops import grouped  # noqa: F401  (registers its operators)
from runtime.states import buckets, host_memory

_aten, _c10d = torch.ops.aten, torch.ops.c10d
_FLASH = _aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001
_FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default  # noqa: SLF001
_GROUPED_ROWS = torch.ops.meshwright.grouped_rows.default
_GROUPED_OUTER = torch.ops.meshwright.grouped_outer.default
ALLOCATION_BLOCK = 512  # bytes; c10/cuda/CUDACachingAllocator, kMinBlockSize


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One collective or transfer as one rank sees it.

    Attributes:
        operation: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "receive".
        ranks: Global ranks of the group.
        group: torch's name of the group.
        num_bytes: Of the whole tensor (output of a gather, input of a scatter or reduction), or
            of what is sent.
        peer: The other side of a transfer, -1 for collectives.
        tag: Of a transfer.

    """

    operation: str
    ranks: tuple[int, ...]
    num_bytes: int
    num_elements: int
    peer: int = -1
    tag: int = 0
    group: str = ""


class Tracker(TorchDispatchMode):
    """Counts what runs inside it.

    Attributes:
        flops: Executed so far.
        messages: Sent and received so far, in order.
        live: Bytes of storage that are alive.
        peak: The most that was alive since `reset_peak`.

    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.messages: list[Message] = []
        self.live = 0
        self.peak = 0
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._fills_host = False

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 (an operator overload)
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run an operator and count it."""
        del types
        result = func(*args, **(kwargs or {}))
        if func in _FLOPS:
            self.flops += _FLOPS[func](*args)
        elif func in _MESSAGES:
            self.messages.append(_MESSAGES[func](*args))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.hold(leaf)
        return result

    @contextmanager
    def watching(self) -> Iterator["Tracker"]:
        """Track operators, storages that are resized without one, and ways to the host."""
        with (
            patch.object(buckets, "resize", self._resize),
            patch.multiple(
                host_memory,
                is_on_device=lambda _: True,
                to_host=self._to_host(host_memory.to_host),
                to_device=lambda tensor, _: tensor.clone(),
            ),
            self,
        ):
            yield self

    def hold(self, tensor: Tensor) -> None:
        """Count a tensor's storage, if it is new."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._storages:
            return
        size = 0 if self._fills_host else _blocks(storage.nbytes())
        self._storages[key] = (weakref.ref(storage, lambda _: self._release(key)), size)
        self._grow(size)

    def leave(self, tensor: Tensor) -> None:
        """Count a tensor's storage no longer: it lies in host memory."""
        self.hold(tensor)
        key = id(tensor.untyped_storage())
        reference, size = self._storages[key]
        self._storages[key] = (reference, 0)
        self.live -= size

    def reset_peak(self) -> None:
        """Look for the highest point from here on."""
        self.peak = self.live

    def bytes_by_group(self) -> Counter[str]:
        """Return bytes per group's name, without receives and single numbers (losses, norms)."""
        total: Counter[str] = Counter()
        for message in self.messages:
            if message.operation != "receive" and message.num_elements > 1:
                total[message.group] += message.num_bytes
        return total

    def _grow(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)

    def _release(self, key: int) -> None:
        _, size = self._storages.pop(key)
        self.live -= size

    def _to_host(self, copy: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return a copy to the host whose result is not counted."""

        def uncounted(tensor: Tensor) -> Tensor:
            self._fills_host = True
            try:
                return copy(tensor)
            finally:
                self._fills_host = False

        return uncounted

    def _resize(self, flat: Tensor, num_bytes: int) -> None:
        storage = flat.untyped_storage()
        self.hold(flat)
        storage.resize_(num_bytes)
        reference, old = self._storages[id(storage)]
        self._storages[id(storage)] = (reference, _blocks(num_bytes))
        self._grow(_blocks(num_bytes) - old)


def _blocks(num_bytes: int) -> int:
    return -(-num_bytes // ALLOCATION_BLOCK) * ALLOCATION_BLOCK


# FLOPs, by operator.


def _product(a: Tensor, b: Tensor) -> int:
    """[..., m, k] @ [..., k, n]; runs of rows by matrices of their own; rows^T @ rows, by runs."""
    return 2 * a.numel() * b.shape[-1]


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False) -> int:
    """Scores and weighted values; half of the square where causal."""
    del v, dropout
    square = 2 * q.numel() * k.shape[-2]
    return 2 * square // (2 if causal else 1)


def _flash_backward(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> int:  # noqa: ANN401
    """Scores again, then the gradients of values, weights, queries and keys."""
    del gradient
    causal = rest[3]
    return _flash(q, k, v, 0.0, causal) * 5 // 2


_FLOPS: dict[Any, Callable[..., int]] = {
    _aten.mm.default: _product,
    _aten.mm.out: _product,
    _aten.bmm.default: _product,
    _aten.addmm.default: lambda bias, a, b, *_: _product(a, b),  # noqa: ARG005
    _aten.baddbmm.default: lambda bias, a, b, *_: _product(a, b),  # noqa: ARG005
    _GROUPED_ROWS: lambda x, matrices, *_: _product(x, matrices),
    _GROUPED_OUTER: lambda left, right, *_: _product(left, right),
    _FLASH: _flash,
    _FLASH_BACKWARD: _flash_backward,
}


# Messages, by operator.


def _ranks(group: Any) -> tuple[int, ...]:  # noqa: ANN401 (a boxed process group)
    return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))


def _name(group: Any) -> str:  # noqa: ANN401 (a boxed process group)
    return str(dist.ProcessGroup.unbox(group).group_name)


def _collective(operation: str, tensors: Sequence[Tensor], group: Any) -> Message:  # noqa: ANN401
    count = sum(tensor.numel() for tensor in tensors)
    return Message(
        operation=operation,
        ranks=_ranks(group),
        num_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        num_elements=count,
        group=_name(group),
    )


def _transfer(
    operation: str,
    tensors: Sequence[Tensor],
    group: Any,  # noqa: ANN401
    peer: int,
    tag: int,
) -> Message:
    (tensor,) = tensors
    return Message(
        operation=operation,
        ranks=_ranks(group),
        num_bytes=math.prod(tensor.shape) * tensor.element_size(),
        num_elements=math.prod(tensor.shape),
        peer=_ranks(group)[peer],
        tag=tag,
        group=_name(group),
    )


_MESSAGES: dict[Any, Callable[..., Message]] = {
    _c10d.allreduce_.default: lambda xs, group, *_: _collective("all_reduce", xs, group),
    _c10d._allgather_base_.default: (
        lambda out, x, group, *_: _collective("all_gather", [out], group)  # noqa: ARG005
    ),
    _c10d._reduce_scatter_base_.default: (
        lambda out, x, group, *_: _collective("reduce_scatter", [x], group)  # noqa: ARG005
    ),
    _c10d.alltoall_base_.default: (
        lambda out, x, group, *_: _collective("all_to_all", [x], group)  # noqa: ARG005
    ),
    _c10d.send.default: lambda xs, group, to, tag: _transfer("send", xs, group, to, tag),
    _c10d.recv_.default: lambda xs, group, of, tag: _transfer("receive", xs, group, of, tag),
}
