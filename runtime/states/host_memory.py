"""Activations in host memory: what autograd saves leaves the device until backward wants it.

Weights stay: they are there anyway. So do small tensors, whose transfer costs more than it saves.
A tracker of memory, to which all tensors are alike, watches `is_on_device` and the two ways.
The optimizer's and the parameters' way to the host is in `buckets.py`.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from costmodels.units import MIB

LEAST_BYTES = MIB  # chosen: below, a PCIe transfer is mostly latency


def is_on_device(tensor: Tensor) -> bool:
    """Return whether a tensor lies in a device's memory rather than the host's."""
    return tensor.device.type == "cuda"


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, on its way."""
    pinned = tensor.device.type == "cuda"
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
    return host.copy_(tensor, non_blocking=True)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy in a device's memory, on its way."""
    return tensor.to(device, non_blocking=True)


def activations_on_host(
    weights: Iterable[Tensor],
    *,
    least_bytes: int = LEAST_BYTES,
    moves: Callable[[Tensor], bool] | None = None,
) -> AbstractContextManager[object]:
    """Return a context in which autograd's saved activations go to host memory.

    Args:
        weights: Tensors whose storage stays where it is, as do views of them.
        least_bytes: Smaller tensors stay.
        moves: Whether a tensor can move at all; None is `is_on_device`.

    """
    can_move = is_on_device if moves is None else moves
    stays = {weight.untyped_storage()._cdata for weight in weights}  # noqa: SLF001  (no public id)

    def pack(tensor: Tensor) -> tuple[torch.device | None, Tensor]:
        large = tensor.numel() * tensor.element_size() >= least_bytes
        storage = tensor.untyped_storage()._cdata  # noqa: SLF001
        if not large or storage in stays or not can_move(tensor):
            return None, tensor
        return tensor.device, to_host(tensor)

    def unpack(packed: tuple[torch.device | None, Tensor]) -> Tensor:
        device, tensor = packed
        return tensor if device is None else to_device(tensor, device)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
