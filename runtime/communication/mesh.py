"""The process groups along the axes of a layout's grid (`grid`), as one rank sees them.

Only this module and `collectives` use process groups; torch's names for them end here.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store  # no public names when annotated
from torch.distributed.rendezvous import rendezvous

from costmodels.layout import Layout
from runtime.communication.cores import bind_to_cores, take_turns
from runtime.communication.grid import GROUP_AXES, members, partition

if TYPE_CHECKING:
    from runtime.tracing.events import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The ranks along one axis through this rank.

    Attributes:
        axis: One of GROUP_AXES.
        ranks: Global ranks, ascending; a rank's place in them is its coordinate on the axis.
        index: This rank's place.
        backend: "gloo", "nccl", "fake", or "none" for a group of one.
        handle: torch's process group; None for a group of one.
        trace: Is told of every transfer, where there is one.

    """

    axis: str
    ranks: tuple[int, ...]
    index: int
    backend: str
    handle: dist.ProcessGroup | None
    trace: "Trace | None" = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """One rank's view of the grid; handed to whatever communicates.

    Graphs hold it as an attribute, so copying a graph must not copy process groups.
    """

    layout: Layout
    rank: int
    device: torch.device
    groups: Mapping[str, Group]

    def group(self, axis: str) -> Group:
        """Return the group along an axis; KeyError names an axis that does not exist."""
        return self.groups[axis]

    def size(self, axis: str) -> int:
        """Return how many ranks an axis has."""
        return self.groups[axis].size

    def coordinate(self, axis: str) -> int:
        """Return this rank's place on an axis."""
        return self.groups[axis].index

    def __deepcopy__(self, memo: dict[int, Any]) -> "Mesh":
        """Return itself: a mesh is a fact about the process."""
        return self


class World:
    """This process among all of a job, and the process groups made so far.

    Groups are kept by their ranks: axes that span the same ranks share one communicator, and so
    do the meshes of several layouts in one job. A dry run, which wants to know on which axis bytes
    travel, gives each axis its own.
    """

    def __init__(
        self,
        device: torch.device,
        timeout: timedelta,
        store: Store | None = None,
        *,
        shares_groups: bool = True,
    ) -> None:
        """Wrap torch's default process group, which `join` or the caller has initialised."""
        self.store = store
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.backend = str(dist.get_backend())
        self.device = device
        self._timeout = timeout
        everybody = dist.group.WORLD
        assert everybody is not None
        self._shares_groups = shares_groups
        self._handles = {self._key(tuple(range(self.size)), "world"): everybody}

    def second_store(self) -> Store:
        """Return a connection of its own to the job's store, for another thread."""
        clone = getattr(self.store, "clone")  # noqa: B009  (missing in torch's annotations)
        return cast("Store", clone())

    def host_group(self) -> Group:
        """Return a new group of all ranks over the host, for one thread's use; all ranks call."""
        ranks = tuple(range(self.size))
        handle = dist.new_group(list(ranks), timeout=self._timeout, backend="gloo")
        return Group(axis="world", ranks=ranks, index=self.rank, backend="gloo", handle=handle)

    def mesh(self, layout: Layout) -> Mesh:
        """Return this rank's place in a layout, creating the groups that are missing.

        Raises:
            ValueError: The layout does not fill this world.

        """
        if layout.num_gpus != self.size:
            message = (
                f"the layout fills {layout.num_gpus} ranks (dp {layout.data_parallel} x "
                f"tp {layout.tensor_parallel} x pp {layout.pipeline_parallel} x "
                f"cp {layout.context_parallel}), but this job has {self.size}"
            )
            raise ValueError(message)
        groups = {axis: self._group(layout, axis) for axis in GROUP_AXES}
        return Mesh(layout=layout, rank=self.rank, device=self.device, groups=groups)

    def _group(self, layout: Layout, axis: str) -> Group:
        ranks = members(layout, self.rank, axis)
        self._create(layout, axis, ranks)
        alone = len(ranks) == 1
        return Group(
            axis=axis,
            ranks=ranks,
            index=ranks.index(self.rank),
            backend="none" if alone else self.backend,
            handle=None if alone else self._handles[self._key(ranks, axis)],
        )

    def _key(self, ranks: tuple[int, ...], axis: str) -> tuple[tuple[int, ...], str]:
        return ranks, "" if self._shares_groups else axis

    def _create(self, layout: Layout, axis: str, own: tuple[int, ...]) -> None:
        """Create the groups along an axis that are not there yet.

        Every rank asks for every group, others' too, in the same order: torch numbers groups in
        the order of these calls. (Its option that only members call counts the groups that a
        rank is in, which differs between the ends of a pipeline and its middle: they would wait
        for each other under different names.) The fake backend has nobody to wait for.
        """
        is_fake = self.backend == "fake"
        for ranks in [own] if is_fake else partition(layout, axis):
            key = self._key(ranks, axis)
            if len(ranks) > 1 and key not in self._handles:
                self._handles[key] = dist.new_group(
                    list(ranks), timeout=self._timeout, use_local_synchronization=is_fake
                )


@contextmanager
def join(
    *,
    device: torch.device,
    timeout: timedelta,
    store: Store | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> Iterator[World]:
    """Enter the job as one of its ranks and leave it in good order.

    Without a store, rank and world size come from torchrun's environment variables.

    Args:
        device: Where this rank computes; decides between NCCL and gloo.
        timeout: Seconds after which a collective that does not complete is an error.
        store: Meeting point, where torchrun does not provide one.
        rank: This process, with `store`.
        world_size: Processes of the job, with `store`.

    """
    local_rank, num_local = rank, world_size
    if store is None:
        local_rank, num_local = (
            int(os.environ.get(f"LOCAL_{name}", "0")) for name in ("RANK", "WORLD_SIZE")
        )
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
        # torchrun keeps the store when it starts ranks again: the dead ranks' keys are still there.
        store = PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        store.set_timeout(timeout)
    # Before gloo starts its threads; launchers other than torchrun may not say how many there are.
    if device.type == "cpu" and num_local:
        take_turns(num_local)
        bind_to_cores(local_rank, num_local)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    yield World(device, timeout, store)
    # Leaving without a barrier aborts peers that still read from this rank's sockets; after an
    # error there is nobody to wait for and the process ends without tearing down.
    dist.barrier()
    dist.destroy_process_group()
