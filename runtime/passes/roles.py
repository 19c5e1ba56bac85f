"""The part that each parameter plays in tensor parallelism, read off the graph.

A linear layer B is *row* parallel if all that reaches it comes out of other linear layers through
operations that work on each feature (or head) alone; those are *column* parallel:

    q, k, v   -> rope, attention, reshape ->  o           columns, row
    gate, up  -> silu, product            ->  down        columns, row
    norm(residual stream)                 ->  q           neither: a norm mixes all features

The matrix that makes the logits and the one that embeds the tokens are cut along the *vocabulary*.
Everything else is a copy on every rank. Names play no part, so a module of another family gets
roles too.
"""

import operator
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from runtime.ops import norm

_aten = torch.ops.aten
_NORMS = (norm.rms_norm, _aten.rms_norm.default, _aten.layer_norm.default, _aten.mean.dim)
_SPLITS = (_aten.split.Tensor, _aten.chunk.default, _aten.split_with_sizes.default)
# Width of what linear layers make: [batch, length, features]. A norm over such a value mixes all
# features; a norm over [batch, length, heads, width] works on each head alone.
_FEATURE_RANK = 3
_HEADS_RANK, HEADS_DIM = 4, 1  # [batch, heads, length, width]


class Part(StrEnum):
    """How a parameter is cut."""

    COLUMN = "column"
    ROW = "row"
    VOCABULARY = "vocabulary"
    REPLICATED = "replicated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A parameter's part in tensor parallelism.

    Attributes:
        num_segments: Equal parts that a column-parallel layer's output is split into before use.

    """

    part: Part
    num_segments: int = 1


def infer_roles(graph: GraphModule) -> dict[str, Role]:
    """Return the role of every parameter of a canonical graph that is not a plain copy."""
    roles: dict[str, Role] = {}
    for node in graph.graph.nodes:
        if node.target is _aten.linear.default:
            columns = linear_sources(node)
            segments = {source: _num_segments(source) for source in columns}
            if columns and all(segments.values()):
                roles[parameter_name(node.args[1])] = Role(part=Part.ROW)
                for source, count in segments.items():
                    roles |= _column_roles(source, count)
        elif node.target is _aten.cross_entropy_loss.default:
            (head,) = _sources(node.args[0]) or (None,)
            if head is not None:
                roles |= _vocabulary_roles(head)
        elif node.target is _aten.embedding.default and _embeds_tokens(node):
            roles[parameter_name(node.args[0])] = Role(part=Part.VOCABULARY)
    return roles


def parameter_name(node: object) -> str:
    """Return the parameter that a weight operand reads, transposed or not; "" for other values."""
    if isinstance(node, Node) and node.target in (_aten.t.default, _aten.transpose.int):
        node = node.args[0]
    return str(node.target) if isinstance(node, Node) and node.op == "get_attr" else ""


def linear_sources(row: Node) -> tuple[Node, ...]:
    """Return the linear layers that a row layer's input comes out of."""
    return _sources(row.args[0]) if parameter_name(row.args[1]) else ()


def _column_roles(linear: Node, count: int) -> dict[str, Role]:
    role = Role(part=Part.COLUMN, num_segments=count)
    operands = [operand for operand in linear.args[1:] if operand is not None]
    return {parameter_name(operand): role for operand in operands}


def _vocabulary_roles(head: Node) -> dict[str, Role]:
    operands = [operand for operand in head.args[1:] if operand is not None]
    return {parameter_name(operand): Role(part=Part.VOCABULARY) for operand in operands}


def _sources(start: object) -> tuple[Node, ...]:
    """Return the linear layers that a value comes from, () if from anything else as well."""
    found: dict[Node, None] = {}
    waiting, seen = [start], set()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, Node) or node in seen:
            continue
        seen.add(node)
        if node.target is _aten.linear.default:
            found[node] = None
        elif repeats_for_heads(node):
            continue  # one key for all heads: every rank needs all of it
        elif node.target is _aten.embedding.default or _mixes_features(node):
            return ()
        else:
            waiting.extend(node.all_input_nodes)
    return tuple(sorted(found))


def repeats_for_heads(node: Node) -> bool:
    """Tell whether a node copies a value of one head for all: [b, 1, s, d] to [b, heads, s, d]."""
    if node.target is not _aten.expand.default:
        return False
    source, value = node.args[0], node.meta["val"]
    assert isinstance(source, Node)
    single = source.meta["val"].shape
    is_heads = value.dim() == len(single) == _HEADS_RANK
    return bool(is_heads and single[HEADS_DIM] == 1 and value.shape[HEADS_DIM] != 1)


def _mixes_features(node: Node) -> bool:
    if node.target not in _NORMS:
        return False
    source = node.args[0]
    assert isinstance(source, Node)
    rank: int = source.meta["val"].dim()
    return rank <= _FEATURE_RANK


def _num_segments(linear: Node) -> int:
    """Return into how many equal parts a layer's features are split; 0 if they are not equal."""
    for user in linear.users:
        if user.target in _SPLITS:
            sizes = {part.shape[-1] for part in user.meta["val"]}
            return len(user.meta["val"]) if len(sizes) == 1 else 0
    return 1


def _embeds_tokens(embedding: Node) -> bool:
    """Tell whether an embedding looks up the batch's tokens, rather than positions."""
    index = embedding.args[1]
    while isinstance(index, Node) and index.op == "call_function" and _moves_elements(index):
        index = index.args[0]
    return isinstance(index, Node) and index.target == "input_ids"


def _moves_elements(node: Node) -> bool:
    """Tell whether a node has its first input's elements: positions counted to its size do not."""
    source = node.args[0] if node.args else None
    is_of_tensor = isinstance(source, Node) and isinstance(source.meta.get("val"), Tensor)
    return is_of_tensor and node.target is not operator.getitem
