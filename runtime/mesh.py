"""Where a rank stands in a layout's grid, and the process groups of the grid's axes.

Ranks are numbered along `layout.rank_order`, first axis fastest. Beside the four axes of that
grid there are groups that follow from them:

    dp_cp          ranks that hold the same weights and see other tokens (data x context)
    zero           the part of dp_cp that a state is cut over: `zero_group` neighbours
    zero_replicas  ranks of dp_cp that hold the same piece of a state (HSDP)
    ends           the two pipeline ranks that hold the first and the last stage (tied embeddings)
    etp, ep, edp   expert axes folded over data x context x tensor of one stage, etp fastest
    expert_zero, expert_zero_replicas   what `zero` is to dp_cp, of the ranks of edp
    world          everybody

Only this module and `collectives` use process groups; torch's names for them end here.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store  # no public names when annotated
from torch.distributed.rendezvous import rendezvous

from costmodels.layout import AXES, Layout

EXPERT_AXES = ("etp", "ep", "edp")
EXPERT_STATE_AXES = ("expert_zero", "expert_zero_replicas")
GROUP_AXES = (
    *AXES,
    "dp_cp",
    "zero",
    "zero_replicas",
    "ends",
    *EXPERT_AXES,
    *EXPERT_STATE_AXES,
    "world",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The ranks along one axis through this rank.

    Attributes:
        axis: One of GROUP_AXES.
        ranks: Global ranks, ascending; a rank's place in them is its coordinate on the axis.
        index: This rank's place.
        backend: "gloo", "nccl", "fake", or "none" for a group of one.
        handle: torch's process group; None for a group of one.

    """

    axis: str
    ranks: tuple[int, ...]
    index: int
    backend: str
    handle: dist.ProcessGroup | None

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


def degrees(layout: Layout) -> dict[str, int]:
    """Return the size of each of the grid's four axes."""
    return {
        "tp": layout.tensor_parallel,
        "cp": layout.context_parallel,
        "dp": layout.data_parallel,
        "pp": layout.pipeline_parallel,
    }


def coordinates(layout: Layout, rank: int) -> dict[str, int]:
    """Return the place of a global rank on each of the grid's four axes."""
    sizes, place = degrees(layout), {}
    for axis in layout.rank_order:
        rank, place[axis] = divmod(rank, sizes[axis])
    return place


def rank_at(layout: Layout, place: Mapping[str, int]) -> int:
    """Return the global rank at a place; the inverse of `coordinates`."""
    sizes, rank, stride = degrees(layout), 0, 1
    for axis in layout.rank_order:
        rank += place[axis] * stride
        stride *= sizes[axis]
    return rank


def members(layout: Layout, rank: int, axis: str) -> tuple[int, ...]:
    """Return the global ranks, ascending, of the group along an axis through a rank.

    Args:
        layout: Degrees and rank order.
        rank: The global rank that asks.
        axis: One of GROUP_AXES.

    """
    if axis == "world":
        return tuple(range(layout.num_gpus))
    if axis in AXES:
        return _spanned(layout, rank, (axis,))
    if axis == "ends":
        return _ends(layout, rank)
    if axis in EXPERT_AXES:
        return _expert_members(layout, rank, axis)
    peers = _spanned(layout, rank, ("dp", "cp"))
    if axis == "dp_cp":
        return peers
    size = layout.zero_group
    if axis in EXPERT_STATE_AXES:
        peers, size = _expert_members(layout, rank, "edp"), expert_zero_group(layout)
    block, offset = divmod(peers.index(rank), size)
    return peers[offset::size] if axis.endswith("replicas") else peers[block * size :][:size]


def expert_zero_group(layout: Layout) -> int:
    """Return how many ranks cut a state of experts: those of a ZeRO group that share experts."""
    experts = layout.expert_parallel * layout.expert_tensor_parallel
    return max(layout.zero_group * layout.tensor_parallel // experts, 1)


def partition(layout: Layout, axis: str) -> tuple[tuple[int, ...], ...]:
    """Return the groups of all ranks along an axis, by their first rank."""
    found: dict[int, tuple[int, ...]] = {}
    for rank in range(layout.num_gpus):
        if rank not in found:
            ranks = members(layout, rank, axis)
            found.update(dict.fromkeys(ranks, ranks))
    return tuple(dict.fromkeys(found.values()))


def _spanned(layout: Layout, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
    """Return the ranks that differ from one in the given axes only."""
    here, sizes = coordinates(layout, rank), degrees(layout)
    places = [here]
    for axis in axes:
        places = [{**place, axis: i} for place in places for i in range(sizes[axis])]
    return tuple(sorted(rank_at(layout, place) for place in places))


def _ends(layout: Layout, rank: int) -> tuple[int, ...]:
    here = coordinates(layout, rank)
    ends = {layout.rank_of_stage(0), layout.rank_of_stage(layout.num_stages - 1)}
    if here["pp"] not in ends:
        return (rank,)
    return tuple(sorted(rank_at(layout, {**here, "pp": end}) for end in ends))


def _expert_members(layout: Layout, rank: int, axis: str) -> tuple[int, ...]:
    peers = _spanned(layout, rank, ("dp", "cp", "tp"))
    tensor, expert = layout.expert_tensor_parallel, layout.expert_parallel
    at = peers.index(rank)
    if axis == "etp":
        return peers[at - at % tensor :][:tensor]
    block = tensor * expert
    if axis == "ep":
        return peers[at - at % block + at % tensor :][: block - at % tensor : tensor]
    return peers[at % block :: block]


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
    if store is None:
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
        # torchrun keeps the store when it starts ranks again: the dead ranks' keys are still there.
        store = PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        store.set_timeout(timeout)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    yield World(device, timeout, store)
    # Leaving without a barrier aborts peers that still read from this rank's sockets; after an
    # error there is nobody to wait for and the process ends without tearing down.
    dist.barrier()
    dist.destroy_process_group()
