"""Placement rules of what has weights, and of attention."""

import torch
from torch.fx import Node

from runtime.ops import vocab_parallel
from runtime.passes.basic_rules import done_whole, whole
from runtime.passes.placements import Partial, Placement, Replicated, Sharded
from runtime.passes.sharder import AXIS, SEQUENCE_DIM, Sharder
from runtime.program import IGNORED_LABEL

_aten = torch.ops.aten


def linear(sharder: Sharder, node: Node) -> Placement:
    """Multiply by columns (output cut), by rows (output summed) or by a copy."""
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


def embedding(sharder: Sharder, node: Node) -> Placement:
    """Look tokens up in this rank's part of the vocabulary and sum, or in a copy."""
    weight, ids = node.args[0], node.args[1]
    assert isinstance(weight, Node)
    if isinstance(sharder.placement(weight), Replicated):
        return _replicated_embedding(sharder, node, weight)
    lookup = vocab_parallel.vocab_parallel_embedding
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
        return whole(sharder, node)
    dim = ids.meta["val"].dim() - 1  # [batch, length], or [length] of a model that counts itself
    node.replace_input_with(ids, sharder.to_sharded(ids, dim, node))
    sharder.note_gradient(weight, is_partial=True)
    return Sharded(dim)


def cross_entropy(sharder: Sharder, node: Node) -> Placement:
    """Compute the loss from logits whose vocabulary is cut."""
    logits, labels = node.args[0], node.args[1]
    assert isinstance(logits, Node)
    if isinstance(sharder.placement(logits), Replicated):
        return Replicated()
    assert sharder.placement(logits) == Sharded(1), f"{node.name}: logits are not [tokens, V/tp]"
    vocab_size = int(logits.meta["val"].shape[1])
    arguments = (logits, labels, sharder.mesh, AXIS, vocab_size, IGNORED_LABEL)
    loss = sharder.call(vocab_parallel.vocab_parallel_cross_entropy, arguments, node, Replicated())
    node.replace_all_uses_with(loss)
    sharder.graph.erase_node(node)
    return Replicated()


def norm(sharder: Sharder, node: Node) -> Placement:
    """Normalise dims that are not cut; each rank its own rows."""
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


def experts(sharder: Sharder, node: Node) -> Placement:
    """Route tokens that no other rank has: those of the stream, or this rank's part of them."""
    if sharder.size == 1:
        return whole(sharder, node)
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


def attention(sharder: Sharder, node: Node) -> Placement:
    """Heads (dim 1 of [b, heads, s, d]) attend alone."""
    places = {sharder.placement(operand) for operand in node.all_input_nodes}
    if places == {Replicated()}:
        return whole(sharder, node)
    if places != {Sharded(1)}:
        return done_whole(sharder, node)
    return Sharded(1)
