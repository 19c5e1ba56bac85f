"""Collectives between the ranks of one mesh axis, in three layers.

1. Functions for graphs, `all_gather(x, mesh, "tp", dim)`: differentiable, so a graph that names
   its forward collectives has its backward ones too. Each is one forward exchange and its adjoint:

       function            forward         backward
       copy_to             nothing         all-reduce
       reduce_from         all-reduce      nothing
       all_gather          all-gather      reduce-scatter
       reduce_scatter      reduce-scatter  all-gather
       split               take own part   all-gather
       gather_replicated   all-gather      take own part
       all_to_all          all-to-all      all-to-all, sizes swapped

   `all_gather` serves consumers that differ between ranks (their gradients add up),
   `gather_replicated` consumers that do the same on every rank.
2. Functions on a `Group` for states and scalars, without gradients; `start_*` return a `Pending`.
3. torch.distributed, or `gloo.py`, whose algorithms are faster where processes share cores.

Results are contiguous: point-to-point transfers need it. A group of one costs nothing.
"""

# ruff: noqa: ANN401, PLR0917  (autograd contexts take any attribute; graphs pass by position)

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.communication import gloo
from runtime.communication.mesh import Group, Mesh
from runtime.communication.pending import Done, Pending, Watch

Exchange = Callable[[Tensor, Group, int], Tensor]


# Functions for graphs.


def copy_to(x: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """Hand a replicated tensor to work that differs between ranks; gradients are summed."""
    return _exchange(x, mesh, axis, 0, _keep, _sum)


def reduce_from(x: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """Sum partial results over an axis; the gradient is the same on every rank."""
    return _exchange(x, mesh, axis, 0, _sum, _keep)


def all_gather(x: Tensor, mesh: Mesh, axis: str, dim: int) -> Tensor:
    """Concatenate shards along a dim for work that differs between ranks."""
    return _exchange(x, mesh, axis, dim, _concatenate, _sum_and_split)


def reduce_scatter(x: Tensor, mesh: Mesh, axis: str, dim: int) -> Tensor:
    """Sum partial results over an axis and keep this rank's part along a dim."""
    return _exchange(x, mesh, axis, dim, _sum_and_split, _concatenate)


def split(x: Tensor, mesh: Mesh, axis: str, dim: int) -> Tensor:
    """Keep this rank's part of a replicated tensor."""
    return _exchange(x, mesh, axis, dim, _own_part, _concatenate)


def gather_replicated(x: Tensor, mesh: Mesh, axis: str, dim: int) -> Tensor:
    """Concatenate shards along a dim for work that every rank does alike."""
    return _exchange(x, mesh, axis, dim, _concatenate, _own_part)


def all_to_all(
    x: Tensor, mesh: Mesh, axis: str, output_sizes: Sequence[int], input_sizes: Sequence[int]
) -> Tensor:
    """Send a run of rows to each rank of an axis and receive one from each.

    Args:
        x: Rows, grouped by the rank they go to.
        mesh: Where this rank stands.
        axis: Axis of the exchange.
        output_sizes: Rows that arrive from each rank.
        input_sizes: Rows that go to each rank.

    """
    group = mesh.group(axis)
    if group.size == 1:
        return x
    return _apply(_AllToAll, x, group, tuple(output_sizes), tuple(input_sizes))


# Functions on a group.


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Return the sum or maximum ("max") of a tensor over a group, as a new tensor."""
    return start_all_reduce(x.contiguous().clone(), group, op).wait()


def start_all_reduce(x: Tensor, group: Group, op: str = "sum") -> Pending:
    """Begin to reduce a contiguous tensor in place."""
    if group.size == 1:
        return Done(x)
    watch = watch_of(group, "all_reduce", x)
    if group.backend == "gloo":
        return gloo.start_all_reduce(x, group, op).watched_by(watch)
    reduce_op = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
    work = dist.all_reduce(x, reduce_op, group=group.handle, async_op=True)
    return Pending([work], x).watched_by(watch)


def start_all_gather(full: Tensor, shard: Tensor, group: Group) -> Pending:
    """Begin to fill a flat tensor with the group's equal flat shards, in rank order.

    Args:
        full: Contiguous, size * group.size elements; may hold `shard` at its own place.
        shard: Contiguous.
        group: Ranks that take part.

    """
    if group.size == 1:
        return Done(full.copy_(shard))
    watch = watch_of(group, "all_gather", full)
    if group.backend == "gloo":
        return gloo.start_all_gather(full, shard, group).watched_by(watch)
    work = dist.all_gather_single(full, shard, group=group.handle, async_op=True)
    return Pending([work], full).watched_by(watch)


def start_reduce_scatter(full: Tensor, group: Group) -> Pending:
    """Begin to sum flat tensors over a group; the result is this rank's equal part.

    `full` must stay as it is until the wait.
    """
    if group.size == 1:
        return Done(full)
    watch = watch_of(group, "reduce_scatter", full)
    if group.backend == "gloo":
        return gloo.start_reduce_scatter(full, group).watched_by(watch)
    shard = full.new_empty(full.numel() // group.size)
    work = dist.reduce_scatter_single(shard, full, group=group.handle, async_op=True)
    return Pending([work], shard, keep=full).watched_by(watch)


def start_send(x: Tensor, group: Group, to: int, tag: int) -> Pending:
    """Begin to send a contiguous tensor to a rank, by its place in the group.

    On NCCL the messages of a pair of ranks share a queue (all of a group's, where torch connects
    groups eagerly): both ends must begin them in one order, or go through `ring.start_shift`.
    """
    watch = watch_of(group, "send", x)
    work = dist.isend(x, group=group.handle, group_dst=to, tag=tag)
    return Pending([work], x).watched_by(watch)


def start_receive(buffer: Tensor, group: Group, sender: int, tag: int) -> Pending:
    """Begin to fill a contiguous tensor with what a rank of the group sends."""
    watch = watch_of(group, "receive", buffer)
    work = dist.irecv(buffer, group=group.handle, group_src=sender, tag=tag)
    return Pending([work], buffer).watched_by(watch)


def watch_of(group: Group, operation: str, x: Tensor) -> Watch | None:
    """Tell a group's trace, if it has one, that a transfer of a tensor begins."""
    if group.trace is None:
        return None
    return group.trace.transfer(operation, group.axis, x.numel() * x.element_size())


# Adjoint pairs.


def _apply(function: type[torch.autograd.Function], *arguments: object) -> Tensor:
    apply = cast("Callable[..., Tensor]", function.apply)
    return apply(*arguments)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, dim: int, forward: Exchange, backward: Exchange
    ) -> Tensor:
        ctx.call = (group, dim, backward)
        return forward(x, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        group, dim, backward = ctx.call
        return backward(gradient, group, dim), None, None, None, None


def _exchange(
    x: Tensor, mesh: Mesh, axis: str, dim: int, forward: Exchange, backward: Exchange
) -> Tensor:
    group = mesh.group(axis)
    if group.size == 1:
        return x
    return _apply(_Exchange, x, group, dim, forward, backward)


def _keep(x: Tensor, group: Group, dim: int) -> Tensor:  # noqa: ARG001  (an Exchange)
    return x.view_as(x)


def _sum(x: Tensor, group: Group, dim: int) -> Tensor:  # noqa: ARG001  (an Exchange)
    return all_reduce(x, group)


def _own_part(x: Tensor, group: Group, dim: int) -> Tensor:
    return x.chunk(group.size, dim)[group.index].contiguous()


def _concatenate(x: Tensor, group: Group, dim: int) -> Tensor:
    leading = x.movedim(dim, 0).contiguous()
    full = leading.new_empty((group.size * leading.shape[0], *leading.shape[1:]))
    start_all_gather(full.view(-1), leading.view(-1), group).wait()
    return full.movedim(0, dim).contiguous()


def _sum_and_split(x: Tensor, group: Group, dim: int) -> Tensor:
    leading = x.movedim(dim, 0).contiguous()
    shape = (leading.shape[0] // group.size, *leading.shape[1:])
    shard = start_reduce_scatter(leading.view(-1), group).wait()
    return shard.view(shape).movedim(0, dim).contiguous()


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, output_sizes: Sequence[int], input_sizes: Sequence[int]
    ) -> Tensor:
        ctx.call = (group, output_sizes, input_sizes)
        return _all_to_all(x, group, output_sizes, input_sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        group, output_sizes, input_sizes = ctx.call
        return _all_to_all(gradient, group, input_sizes, output_sizes), None, None, None


def _all_to_all(
    x: Tensor, group: Group, output_sizes: Sequence[int], input_sizes: Sequence[int]
) -> Tensor:
    received = x.new_empty((sum(output_sizes), *x.shape[1:]))
    watch = watch_of(group, "all_to_all", x)
    sizes = list(output_sizes), list(input_sizes)
    work = dist.all_to_all_single(
        received, x.contiguous(), *sizes, group=group.handle, async_op=True
    )
    return Pending([work], received).watched_by(watch).wait()
