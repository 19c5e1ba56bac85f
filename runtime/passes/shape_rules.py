"""Placement rules of operations that move, join, split or reduce dims.

Sizes in the graph are those of whole values; where a rule keeps a cut it divides the size.
"""

import operator

import torch
from torch.fx import Node

from runtime.passes.basic_rules import done_whole, whole
from runtime.passes.placements import (
    Placement,
    Replicated,
    Sharded,
    moved_by_transpose,
    reshaped_dim,
)
from runtime.passes.roles import HEADS_DIM, repeats_for_heads
from runtime.passes.sharder import Sharder

_aten = torch.ops.aten


def _dims(node: Node, position: int, rank: int) -> tuple[int, ...]:
    """Return the dims that an argument names, counted from the left; torch's default is 0."""
    given = node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)
    listed = given if isinstance(given, (list, tuple)) else [given]
    return tuple(dim % rank for dim in listed if isinstance(dim, int))


def reshape(sharder: Sharder, node: Node) -> Placement:
    """Keep a cut that survives the reshape, gather one that does not."""
    x = node.args[0]
    assert isinstance(x, Node)
    at = sharder.placement(x)
    if not isinstance(at, Sharded):
        return whole(sharder, node)
    after = node.meta["val"].shape
    dim = reshaped_dim(x.meta["val"].shape, after, at.dim)
    if dim is None:
        node.replace_input_with(x, sharder.to_replicated(x, node, uses_differ=False))
        return Replicated()
    if node.target is not _aten.flatten.using_ints:
        _localise_size(sharder, node, dim)
    return Sharded(dim, at.num_segments)


def _localise_size(sharder: Sharder, node: Node, dim: int) -> None:
    """Divide the entry of a shape argument that belongs to a cut dim."""
    shape = list(node.args[1])  # type: ignore[arg-type]
    given = shape[dim]
    if isinstance(given, int) and given != -1:
        shape[dim] = sharder.local_size(given, f"{node.name}: dim {dim}")
    elif isinstance(given, Node):
        with sharder.graph.inserting_before(node):
            shape[dim] = sharder.graph.call_function(operator.floordiv, (given, sharder.size))
        shape[dim].meta = {"val": None, "module": node.meta["module"]}
    else:
        sharder.local_size(int(node.meta["val"].shape[dim]), f"{node.name}: dim {dim}")
    node.args = (node.args[0], shape, *node.args[2:])


def expand(sharder: Sharder, node: Node) -> Placement:
    """Repeat along new or single dims, which are never cut; for all heads, for a rank's own."""
    x = node.args[0]
    assert isinstance(x, Node)
    if repeats_for_heads(node) and _joins_cut_heads(sharder, node):
        node.replace_input_with(x, sharder.to_replicated(x, node, uses_differ=True))
        _localise_size(sharder, node, HEADS_DIM)
        return Sharded(HEADS_DIM)
    at = sharder.placement(x)
    if not isinstance(at, Sharded):
        return whole(sharder, node)
    dim = at.dim + node.meta["val"].dim() - x.meta["val"].dim()
    _localise_size(sharder, node, dim)
    return Sharded(dim, at.num_segments)


def _joins_cut_heads(sharder: Sharder, node: Node) -> bool:
    """Tell whether copies for all heads meet values of which each rank has its own heads."""
    return any(
        user.target is _aten.cat.default
        and any(sharder.placement(other) == Sharded(HEADS_DIM) for other in user.all_input_nodes)
        for user in node.users
    )


def transpose(sharder: Sharder, node: Node) -> Placement:
    """Move the cut with its dim."""
    x = node.args[0]
    assert isinstance(x, Node)
    at, rank = sharder.placement(x), x.meta["val"].dim()
    if not isinstance(at, Sharded):
        return at
    ((first,), (second,)) = (
        ((0,), (1,))
        if node.target is _aten.t.default
        else (_dims(node, 1, rank), _dims(node, 2, rank))
    )
    moved = moved_by_transpose(at.dim, first, second)
    return Sharded(moved, at.num_segments)


def unsqueeze(sharder: Sharder, node: Node) -> Placement:
    """Move the cut past a new dim."""
    x = node.args[0]
    assert isinstance(x, Node)
    at = sharder.placement(x)
    if not isinstance(at, Sharded):
        return at
    (new,) = _dims(node, 1, node.meta["val"].dim())
    return Sharded(at.dim + (new <= at.dim), at.num_segments)


def split(sharder: Sharder, node: Node) -> Placement:
    """Split along a dim; along the cut one only if the pieces are its segments."""
    x = node.args[0]
    assert isinstance(x, Node)
    at = sharder.placement(x)
    (dim,) = _dims(node, 2, x.meta["val"].dim())
    if not isinstance(at, Sharded) or at.dim != dim:
        return at
    if at.num_segments != len(node.meta["val"]):
        return done_whole(sharder, node)
    if node.target is not _aten.chunk.default:
        piece = sharder.local_size(int(node.meta["val"][0].shape[dim]), f"{node.name}: dim {dim}")
        sizes = piece if node.target is _aten.split.Tensor else [piece] * at.num_segments
        node.args = (x, sizes, dim)
    return Sharded(dim)


def same_as_input(sharder: Sharder, node: Node) -> Placement:
    """Place the result as the first input lies."""
    (source, *_) = node.all_input_nodes
    return sharder.placement(source)


def along_dims(sharder: Sharder, node: Node) -> Placement:
    """Reduce, slice or normalise along dims that are not cut."""
    x = node.args[0]
    assert isinstance(x, Node)
    at = sharder.placement(x)
    if not isinstance(at, Sharded):
        return whole(sharder, node)
    rank = x.meta["val"].dim()
    dims = _dims(node, 1, rank)
    if at.dim in dims:
        return done_whole(sharder, node)
    keeps_rank = node.meta["val"].dim() == rank
    return at if keeps_rank else Sharded(at.dim - sum(dim < at.dim for dim in dims))


def cat(sharder: Sharder, node: Node) -> Placement:
    """Join along a dim that is not cut, from values cut alike."""
    (dim,) = _dims(node, 1, node.meta["val"].dim())
    places = {sharder.placement(source) for source in node.all_input_nodes}
    (at, *others) = places
    if others or (isinstance(at, Sharded) and at.dim == dim):
        return done_whole(sharder, node)
    return at


def size_of_dim(sharder: Sharder, node: Node) -> Placement:
    """Sizes in the graph are those of whole values."""
    source, dim = node.args[0], node.args[1]
    assert isinstance(source, Node)
    at = sharder.placement(source)
    if isinstance(at, Sharded) and at.dim == dim:
        with sharder.graph.inserting_after(node):
            whole = sharder.graph.call_function(operator.mul, (node, sharder.size))
        whole.meta = dict(node.meta)
        node.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not whole)
    return Replicated()
