"""How each operation places its result, and what it needs of its inputs: one rule an operation.

A rule looks at its inputs' placements, inserts what is missing through the `Sharder`, rewrites
sizes that were whole, and returns the placement of the result. An operation without a rule is
done whole on every rank (with a warning, as that costs a gather).
"""

import operator
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.fx import Node

from runtime import collectives
from runtime.ops import norm
from runtime.passes.placements import (
    Partial,
    Placement,
    Replicated,
    Sharded,
    moved_by_transpose,
    reshaped_dim,
)
from runtime.passes.sharder import AXIS, SEQUENCE_DIM, Sharder
from runtime.program import IGNORED_LABEL

_aten = torch.ops.aten
Rule: TypeAlias = Callable[[Sharder, Node], Placement]


def place(sharder: Sharder, node: Node) -> Placement:
    """Place one node, rewriting it and its inputs where needed."""
    if node.op == "get_attr":
        return sharder.cut_parameter(node)
    if node.op != "call_function":
        return Replicated()
    inputs = node.all_input_nodes
    rule = _RULES.get(node.target)
    if rule is None and all(isinstance(sharder.placement(i), Replicated) for i in inputs):
        return _whole(sharder, node)
    if rule is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        rule = _pointwise
    return (rule or _unknown)(sharder, node)


def _whole(sharder: Sharder, node: Node) -> Placement:
    for source in node.all_input_nodes:
        sharder.note_gradient(source, is_partial=False)
    return Replicated()


def _unknown(sharder: Sharder, node: Node) -> Placement:
    sharder.warnings.append(
        f"{node.meta['module']}: no rule cuts {node.target}; it is done whole on every rank"
    )
    for source in node.all_input_nodes:
        node.replace_input_with(source, sharder.to_replicated(source, node, uses_differ=False))
    return _whole(sharder, node)


def _size(sharder: Sharder, source: Node, dim: int) -> int:
    return sharder.local_size(int(source.meta["val"].shape[dim]), f"{source.name}: dim {dim}")


# Layers with weights.


def _linear(sharder: Sharder, node: Node) -> Placement:
    x, weight = node.args[0], node.args[1]
    bias = node.args[2] if len(node.args) > 2 else None  # noqa: PLR2004
    assert isinstance(x, Node)
    assert isinstance(weight, Node)
    match sharder.placement(weight):
        case Sharded(0, num_segments):
            node.replace_input_with(x, sharder.to_replicated(x, node, uses_differ=True))
            return Sharded(node.meta["val"].dim() - 1, num_segments)
        case Sharded(1, _):
            return _row_linear(sharder, node, x, weight, bias)
    at = sharder.placement(x)
    if at == Sharded(x.meta["val"].dim() - 1):
        node.replace_input_with(x, sharder.to_replicated(x, node, uses_differ=False))
        at = Replicated()
    for operand in (weight, bias):
        if isinstance(operand, Node):
            _note_weight(sharder, operand, is_partial=isinstance(at, Sharded))
    return at


def _note_weight(sharder: Sharder, operand: Node, *, is_partial: bool) -> None:
    source = operand.args[0] if operand.target is _aten.t.default else operand
    assert isinstance(source, Node)
    sharder.note_gradient(source, is_partial=is_partial)


def _row_linear(sharder: Sharder, node: Node, x: Node, weight: Node, bias: object) -> Placement:
    """Multiply local features, sum over ranks, then add the bias once."""
    x = sharder.to_sharded(x, x.meta["val"].dim() - 1, node)
    product = sharder.call(_aten.linear.default, (x, weight), node, Partial())
    total = sharder.to_stream(product, node)
    at = sharder.placement(total)
    if isinstance(bias, Node):
        total = sharder.call(_aten.add.Tensor, (total, bias), node, at)
        sharder.note_gradient(bias, is_partial=isinstance(at, Sharded))
    node.replace_all_uses_with(total)
    sharder.graph.erase_node(node)
    return at


def _embedding(sharder: Sharder, node: Node) -> Placement:
    weight, ids = node.args[0], node.args[1]
    assert isinstance(weight, Node)
    if isinstance(sharder.placement(weight), Replicated):
        return _replicated_embedding(sharder, node, weight)
    lookup = collectives.vocab_parallel_embedding
    found = sharder.call(lookup, (weight, ids, sharder.mesh, AXIS), node, Partial())
    total = sharder.to_stream(found, node)
    node.replace_all_uses_with(total)
    sharder.graph.erase_node(node)
    return sharder.placement(total)


def _replicated_embedding(sharder: Sharder, node: Node, weight: Node) -> Placement:
    """Look up the part of the sequence that the stream holds: cheaper than to cut the result."""
    ids = node.args[1]
    assert isinstance(ids, Node)
    if not sharder.sequence_parallel or sharder.is_trained(ids):
        return _whole(sharder, node)
    node.replace_input_with(ids, sharder.to_sharded(ids, SEQUENCE_DIM, node))
    sharder.note_gradient(weight, is_partial=True)
    return Sharded(SEQUENCE_DIM)


def _cross_entropy(sharder: Sharder, node: Node) -> Placement:
    logits, labels = node.args[0], node.args[1]
    assert isinstance(logits, Node)
    if isinstance(sharder.placement(logits), Replicated):
        return Replicated()
    assert sharder.placement(logits) == Sharded(1), f"{node.name}: logits are not [tokens, V/tp]"
    vocab_size = int(logits.meta["val"].shape[1])
    arguments = (logits, labels, sharder.mesh, AXIS, vocab_size, IGNORED_LABEL)
    loss = sharder.call(collectives.vocab_parallel_cross_entropy, arguments, node, Replicated())
    node.replace_all_uses_with(loss)
    sharder.graph.erase_node(node)
    return Replicated()


def _norm(sharder: Sharder, node: Node) -> Placement:
    x, shape = node.args[0], node.args[1]
    assert isinstance(x, Node)
    assert isinstance(shape, (list, tuple))
    at = sharder.placement(x)
    if isinstance(at, Sharded) and at.dim >= x.meta["val"].dim() - len(shape):
        node.replace_input_with(x, sharder.to_replicated(x, node, uses_differ=False))
        at = Replicated()
    for weight in node.all_input_nodes[1:]:
        sharder.note_gradient(weight, is_partial=isinstance(at, Sharded))
    return at


def _experts(sharder: Sharder, node: Node) -> Placement:
    """Route tokens that no other rank has: those of the stream, or this rank's part of them."""
    if sharder.size == 1:
        return _whole(sharder, node)
    x, router = node.args[0], node.args[1]
    assert isinstance(x, Node)
    assert isinstance(router, Node)
    node.replace_input_with(x, sharder.to_sharded(x, SEQUENCE_DIM, node))
    sharder.note_gradient(router, is_partial=True)
    answers = sharder.call(node.target, node.args, node, Sharded(SEQUENCE_DIM))  # type: ignore[arg-type]
    if not sharder.sequence_parallel:
        answers = sharder.to_replicated(answers, node, uses_differ=False)
    node.replace_all_uses_with(answers)
    sharder.graph.erase_node(node)
    return sharder.placement(answers)


# Attention.


def _attention(sharder: Sharder, node: Node) -> Placement:
    """Heads (dim 1 of [b, heads, s, d]) attend alone."""
    places = {sharder.placement(operand) for operand in node.all_input_nodes}
    if places == {Replicated()}:
        return _whole(sharder, node)
    if places != {Sharded(1)}:
        return _unknown(sharder, node)
    return Sharded(1)


# Shapes.


def _dims(node: Node, position: int, rank: int) -> tuple[int, ...]:
    """Return the dims that an argument names, counted from the left; torch's default is 0."""
    given = node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)
    listed = given if isinstance(given, (list, tuple)) else [given]
    return tuple(dim % rank for dim in listed if isinstance(dim, int))


def _reshape(sharder: Sharder, node: Node) -> Placement:
    x = node.args[0]
    assert isinstance(x, Node)
    at = sharder.placement(x)
    if not isinstance(at, Sharded):
        return _whole(sharder, node)
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
        _size(sharder, node, dim)
    node.args = (node.args[0], shape, *node.args[2:])


def _expand(sharder: Sharder, node: Node) -> Placement:
    x = node.args[0]
    assert isinstance(x, Node)
    at = sharder.placement(x)
    if not isinstance(at, Sharded):
        return _whole(sharder, node)
    dim = at.dim + node.meta["val"].dim() - x.meta["val"].dim()
    _localise_size(sharder, node, dim)
    return Sharded(dim, at.num_segments)


def _transpose(sharder: Sharder, node: Node) -> Placement:
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


def _unsqueeze(sharder: Sharder, node: Node) -> Placement:
    x = node.args[0]
    assert isinstance(x, Node)
    at = sharder.placement(x)
    if not isinstance(at, Sharded):
        return at
    (new,) = _dims(node, 1, node.meta["val"].dim())
    return Sharded(at.dim + (new <= at.dim), at.num_segments)


def _split(sharder: Sharder, node: Node) -> Placement:
    """Split along a dim; along the cut one only if the pieces are its segments."""
    x = node.args[0]
    assert isinstance(x, Node)
    at = sharder.placement(x)
    (dim,) = _dims(node, 2, x.meta["val"].dim())
    if not isinstance(at, Sharded) or at.dim != dim:
        return at
    if at.num_segments != len(node.meta["val"]):
        return _unknown(sharder, node)
    if node.target is not _aten.chunk.default:
        piece = sharder.local_size(int(node.meta["val"][0].shape[dim]), f"{node.name}: dim {dim}")
        sizes = piece if node.target is _aten.split.Tensor else [piece] * at.num_segments
        node.args = (x, sizes, dim)
    return Sharded(dim)


def _same_as_input(sharder: Sharder, node: Node) -> Placement:
    (source, *_) = node.all_input_nodes
    return sharder.placement(source)


def _along_dims(sharder: Sharder, node: Node) -> Placement:
    """Reduce, slice or normalise along dims that are not cut."""
    x = node.args[0]
    assert isinstance(x, Node)
    at = sharder.placement(x)
    if not isinstance(at, Sharded):
        return _whole(sharder, node)
    rank = x.meta["val"].dim()
    dims = _dims(node, 1, rank)
    if at.dim in dims:
        return _unknown(sharder, node)
    keeps_rank = node.meta["val"].dim() == rank
    return at if keeps_rank else Sharded(at.dim - sum(dim < at.dim for dim in dims))


def _cat(sharder: Sharder, node: Node) -> Placement:
    (dim,) = _dims(node, 1, node.meta["val"].dim())
    places = {sharder.placement(source) for source in node.all_input_nodes}
    (at, *others) = places
    if others or (isinstance(at, Sharded) and at.dim == dim):
        return _unknown(sharder, node)
    return at


def _size_of_dim(sharder: Sharder, node: Node) -> Placement:
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


def _pointwise(sharder: Sharder, node: Node) -> Placement:
    """Work on elements alone: all operands are cut alike, those that broadcast stay whole."""
    rank = node.meta["val"].dim()
    operands = [i for i in node.all_input_nodes if isinstance(i.meta.get("val"), Tensor)]
    cuts: dict[int, int] = {}
    for operand in operands:
        at = sharder.placement(operand)
        if isinstance(at, Sharded):
            cuts[at.dim + rank - operand.meta["val"].dim()] = at.num_segments
    if len(cuts) != 1:
        return _unknown(sharder, node)
    ((dim, num_segments),) = cuts.items()
    for operand in operands:
        own = dim - rank + operand.meta["val"].dim()
        if not isinstance(sharder.placement(operand), Replicated):
            continue
        if own >= 0 and operand.meta["val"].shape[own] != 1:
            node.replace_input_with(operand, sharder.to_sharded(operand, own, node))
        elif operand.op == "get_attr":
            sharder.note_gradient(operand, is_partial=True)
        else:
            node.replace_input_with(operand, sharder.to_replicated(operand, node, uses_differ=True))
    return Sharded(dim, num_segments)


_RULES: dict[object, Rule] = {
    _aten.linear.default: _linear,
    _aten.embedding.default: _embedding,
    _aten.cross_entropy_loss.default: _cross_entropy,
    _aten.rms_norm.default: _norm,
    norm.rms_norm: _norm,
    _aten.layer_norm.default: _norm,
    _aten.scaled_dot_product_attention.default: _attention,
    _aten.view.default: _reshape,
    _aten.reshape.default: _reshape,
    _aten.flatten.using_ints: _reshape,
    _aten.expand.default: _expand,
    _aten.transpose.int: _transpose,
    _aten.t.default: _transpose,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split,
    _aten.chunk.default: _split,
    torch.ops.meshwright.experts.default: _experts,
    operator.getitem: _same_as_input,
    _aten.to.dtype: _same_as_input,
    _aten.contiguous.default: _same_as_input,
    _aten.clone.default: _same_as_input,
    _aten.mean.dim: _along_dims,
    _aten.sum.dim_IntList: _along_dims,
    _aten.softmax.int: _along_dims,
    _aten.slice.Tensor: _along_dims,
    _aten.cat.default: _cat,
    _aten.sym_size.int: _size_of_dim,
}
