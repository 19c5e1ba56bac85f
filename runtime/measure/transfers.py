"""Samples of communication: collectives and messages by size and group, and what overlap costs.

All groups of a size run at once, as they do in training: with four ranks, two groups of two. The
functions are those that training calls, so that on gloo it is our algorithms that are measured.
On processors products come between the exchanges as they do in training: ranks arrive one after the
other, threads sleep and wake, caches hold other things. Ranks that share cores pause instead, or
they would measure how the cores are shared.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from costmodels.layout import Layout
from costmodels.units import KIB, MIB
from runtime.communication import collectives
from runtime.communication.mesh import Mesh, World
from runtime.communication.pending import Pending
from runtime.measure.samples import Sample, sample
from runtime.measure.stopwatch import Stopwatch

# Bytes of the full tensor. Small ones show the latency, large ones the bandwidth.
SIZES = {
    "cpu": (KIB, 16 * KIB, 128 * KIB, MIB, 4 * MIB, 16 * MIB),
    "cuda": (KIB, 64 * KIB, MIB, 8 * MIB, 64 * MIB, 512 * MIB),
}
OVERLAP_BYTES = {"cpu": 4 * MIB, "cuda": 256 * MIB}
OVERLAP_WIDTH = {"cpu": 512, "cuda": 8192}
# Chosen: about a millisecond lies between two collectives of a layer.
WORK_WIDTH = 512
PAUSE = 1e-3
ITEM = 4  # bytes of fp32
AXIS = "tp"  # the groups are those of this axis


def transfer_samples(watch: Stopwatch, world: World, *, shares_cores: bool) -> Iterator[Sample]:
    """Measure every exchange in groups of each size that divides the ranks.

    Args:
        watch: Measures on this rank.
        world: All ranks that measure.
        shares_cores: Whether there are more ranks than cores.

    """
    work = _work(watch, shares_cores=shares_cores)
    for size in group_sizes(world.size):
        mesh = _mesh_of_groups(world, size)
        for num_bytes in SIZES[watch.device.type]:
            x = torch.ones(num_bytes // ITEM, device=watch.device)
            for formula, exchange in EXCHANGES:
                seconds = _seconds_between(watch, partial(exchange, x, mesh), work)
                # A message knows two ranks, whatever the size of the ring it belongs to.
                group = {} if formula == "send" else {"inner": size}
                yield sample(formula, "fp32", seconds, payload=num_bytes, outer=1, **group)


def _work(watch: Stopwatch, *, shares_cores: bool) -> Callable[[], object] | None:
    """Return what ranks do between two exchanges; None for GPUs, whose host only waits."""
    if watch.device.type != "cpu":
        return None
    if shares_cores:
        return lambda: time.sleep(PAUSE)
    a = torch.ones(WORK_WIDTH, WORK_WIDTH)
    return lambda: torch.mm(a, a)


def _seconds_between(
    watch: Stopwatch, exchange: Callable[[], object], work: Callable[[], object] | None
) -> float:
    """Return the seconds that an exchange adds to the work around it."""
    alone = watch.seconds(exchange)
    if work is None:
        return alone

    def both() -> None:
        work()
        exchange()

    # The difference of two clocks may be anything on a busy machine; half of it it always is.
    return max(watch.seconds(both) - watch.seconds(work), alone / 2)


def overlap_samples(watch: Stopwatch, world: World) -> Iterator[Sample]:
    """Measure products alone, an all-reduce alone, and both begun at once."""
    if world.size == 1:
        return
    group = _mesh_of_groups(world, world.size).group(AXIS)
    kind = watch.device.type
    width = OVERLAP_WIDTH[kind]
    x = torch.ones(OVERLAP_BYTES[kind] // ITEM, device=watch.device)
    a = torch.ones(width, width, device=watch.device)

    def communicate() -> object:
        return collectives.start_reduce_scatter(x, group).wait()

    communication = watch.seconds(communicate)
    one_product = watch.seconds(lambda: torch.mm(a, a))
    num_products = max(1, round(communication / one_product))

    def compute() -> None:
        for _ in range(num_products):
            torch.mm(a, a)

    def both() -> None:
        pending = collectives.start_reduce_scatter(x, group)
        compute()
        pending.wait()

    yield sample(
        "overlap",
        "fp32",
        watch.seconds(both),
        communication=communication,
        hidden_by=watch.seconds(compute),
    )


def group_sizes(num_ranks: int) -> tuple[int, ...]:
    """Return the sizes of groups that divide the ranks, alone excepted."""
    return tuple(size for size in range(2, num_ranks + 1) if num_ranks % size == 0)


def _all_gather(x: Tensor, mesh: Mesh) -> Tensor:
    group = mesh.group(AXIS)
    shard = x[: x.numel() // group.size]
    return collectives.start_all_gather(torch.empty_like(x), shard, group).wait()


def _reduce_scatter(x: Tensor, mesh: Mesh) -> Tensor:
    return collectives.start_reduce_scatter(x, mesh.group(AXIS)).wait()


def _all_reduce(x: Tensor, mesh: Mesh) -> Tensor:
    # Of fresh ones: summing into the same tensor would overflow after 128 calls.
    return collectives.start_all_reduce(torch.ones_like(x), mesh.group(AXIS)).wait()


def _all_to_all(x: Tensor, mesh: Mesh) -> Tensor:
    size = mesh.size(AXIS)
    return collectives.all_to_all(x.view(size, -1), mesh, AXIS, [1] * size, [1] * size)


def _ring_hop(x: Tensor, mesh: Mesh) -> Tensor:
    """Send to the next rank and receive from the one before, as a pipeline in full swing does."""
    group, buffer = mesh.group(AXIS), torch.empty_like(x)
    after, before = (group.index + 1) % group.size, (group.index - 1) % group.size

    def send() -> Pending:
        return collectives.start_send(x, group, after, tag=0)

    def receive() -> Pending:
        return collectives.start_receive(buffer, group, before, tag=0)

    # NCCL runs the messages of a pair in the order they were begun: two that both send first
    # would wait for each other.
    starts = (send, receive) if group.index % 2 == 0 else (receive, send)
    for pending in [start() for start in starts]:
        pending.wait()
    return buffer


# By the formula that predicts them; the model has one for all-gather and reduce-scatter.
EXCHANGES: tuple[tuple[str, Callable[[Tensor, Mesh], Tensor]], ...] = (
    ("all_gather", _all_gather),
    ("all_gather", _reduce_scatter),
    ("all_reduce", _all_reduce),
    ("all_to_all", _all_to_all),
    ("send", _ring_hop),
)


def _mesh_of_groups(world: World, size: int) -> Mesh:
    layout = Layout(tensor_parallel=size, data_parallel=world.size // size, layers_per_stage=(1,))
    return world.mesh(layout)
