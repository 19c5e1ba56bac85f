"""How each operation places its result, and what it needs of its inputs: one rule an operation.

A rule looks at its inputs' placements, inserts what is missing through the `Sharder`, rewrites
sizes that were whole, and returns the placement of the result. An operation without a rule is
done whole on every rank (with a warning, as that costs a gather).
"""

import operator
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch.fx import Node

from runtime.ops import experts as _register_experts  # noqa: F401 (makes the operator known)
from runtime.ops import norm
from runtime.passes import basic_rules, layer_rules, shape_rules
from runtime.passes.placements import Placement, Replicated
from runtime.passes.sharder import Sharder

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
        return basic_rules.whole(sharder, node)
    if rule is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        rule = basic_rules.pointwise
    return (rule or basic_rules.done_whole)(sharder, node)


_RULES: dict[object, Rule] = {
    _aten.linear.default: layer_rules.linear,
    _aten.embedding.default: layer_rules.embedding,
    _aten.cross_entropy_loss.default: layer_rules.cross_entropy,
    _aten.rms_norm.default: layer_rules.norm,
    norm.rms_norm: layer_rules.norm,
    _aten.layer_norm.default: layer_rules.norm,
    _aten.scaled_dot_product_attention.default: layer_rules.attention,
    _aten.view.default: shape_rules.reshape,
    _aten.reshape.default: shape_rules.reshape,
    _aten.flatten.using_ints: shape_rules.reshape,
    _aten.expand.default: shape_rules.expand,
    _aten.transpose.int: shape_rules.transpose,
    _aten.t.default: shape_rules.transpose,
    _aten.unsqueeze.default: shape_rules.unsqueeze,
    _aten.split.Tensor: shape_rules.split,
    _aten.split_with_sizes.default: shape_rules.split,
    _aten.chunk.default: shape_rules.split,
    torch.ops.meshwright.experts.default: layer_rules.experts,
    operator.getitem: shape_rules.same_as_input,
    _aten.to.dtype: shape_rules.same_as_input,
    _aten.contiguous.default: shape_rules.same_as_input,
    _aten.clone.default: shape_rules.same_as_input,
    _aten.mean.dim: shape_rules.along_dims,
    _aten.sum.dim_IntList: shape_rules.along_dims,
    _aten.softmax.int: shape_rules.along_dims,
    _aten.slice.Tensor: shape_rules.along_dims,
    _aten.cat.default: shape_rules.cat,
    _aten.sym_size.int: shape_rules.size_of_dim,
}
