"""The facts of one block of a traced module: heads, widths, norms, biases, what is left over."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from runtime.ops import norm
from runtime.passes.roles import Part, Role, linear_sources, parameter_name

_aten = torch.ops.aten
_ATTENTION = _aten.scaled_dot_product_attention.default
_NORMS = (norm.rms_norm, _aten.rms_norm.default, _aten.layer_norm.default)
_TOKENS_RANK, _HEADS_RANK = 3, 4  # [batch, length, width], [batch, heads, length, width]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFacts:
    """What a block is made of.

    Attributes:
        num_norms: Norms over the whole width.
        vectors: Weights in vectors, all of them.
        matrices: Weights in matrices that no rule cuts.
        is_parallel: The feed-forward part does not read what attention added.

    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    width: int
    is_gated: bool
    activation: str
    qkv_bias: bool
    output_bias: bool
    ffn_bias: bool
    num_norms: int
    norm_vectors: int
    qk_norm: bool
    has_rope: bool
    is_parallel: bool
    vectors: int
    matrices: int

    def spec_fields(self, hidden: int) -> dict[str, Any]:
        """Return the fields of a ModelSpec; vectors that these do not explain stand by the side."""
        count = max((n for n in (1, 2, 4) if n <= self.num_norms), default=1)
        per_norm = self.norm_vectors // max(self.num_norms, 1)
        kind = {0: "nonparametric-layernorm", 1: "rmsnorm"}.get(per_norm, "layernorm")
        columns = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        explained = (
            count * per_norm * hidden
            + self.qkv_bias * columns
            + self.output_bias * hidden
            + self.ffn_bias * ((1 + self.is_gated) * self.width + hidden)
            + self.qk_norm * 2 * self.head_dim
        )
        return {
            "num_attention_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "ffn_hidden_size": self.width,
            "gated_ffn": self.is_gated,
            "activation": self.activation,
            "norm": kind,
            "norms_per_layer": count,
            "qk_norm": "per-head" if self.qk_norm else "none",
            "parallel_block": self.is_parallel,
            "qkv_bias": self.qkv_bias,
            "attention_output_bias": self.output_bias,
            "ffn_bias": self.ffn_bias,
            "rope_theta": 10_000.0 if self.has_rope else None,
            "whole_matrices": self.matrices,
            "whole_vectors": self.vectors - explained,
        }


def facts_of_block(
    graph: GraphModule, nodes: list[Node], roles: dict[str, Role], where: str
) -> BlockFacts:
    """Read the facts of a block off its nodes.

    Raises:
        ValueError: It has not one attention and one feed-forward part that ranks can share.

    """
    attention, output, down = _products(nodes, roles, where)
    query, key = (_shape(operand) for operand in attention.args[:2])
    columns, inputs = linear_sources(output), linear_sources(down)
    width = int(_shape(down.args[0])[-1])
    made = sum(int(node.meta["val"].shape[-1]) for node in inputs)
    if made not in (width, 2 * width):
        raise ValueError(f"{where} makes {made} features for a feed-forward of width {width}")
    inside = _ancestors(attention, within=set(nodes))
    parameters = held_parameters(graph, nodes)
    vectors = {name: p.numel() for name, p in parameters.items() if p.dim() <= 1}
    norms = [node for node in nodes if _is_norm(node, _TOKENS_RANK)]
    head_norms = [node for node in nodes if _is_norm(node, _HEADS_RANK)]
    return BlockFacts(
        num_heads=int(query[1]),
        num_kv_heads=int(key[1]),
        head_dim=int(query[3]),
        width=width,
        is_gated=made == 2 * width,
        activation="silu" if _has(nodes, _aten.silu.default) else "gelu",
        qkv_bias=all(has_bias(node) for node in columns),
        output_bias=has_bias(output),
        ffn_bias=all(has_bias(node) for node in (*inputs, down)),
        num_norms=len(norms),
        norm_vectors=sum(_num_vectors(node) for node in norms),
        qk_norm=len(head_norms) == 2 and all(_num_vectors(n) == 1 for n in head_norms),  # noqa: PLR2004  (query, key)
        has_rope=any(
            node.target is _aten.mul.Tensor and node.meta["val"].dim() == _HEADS_RANK
            for node in inside
        ),
        is_parallel=output not in _ancestors(down, within=set(nodes)),
        vectors=sum(vectors.values()),
        matrices=sum(
            p.numel() for name, p in parameters.items() if p.dim() > 1 and name not in roles
        ),
    )


def held_parameters(graph: GraphModule, nodes: Iterable[Node]) -> dict[str, Tensor]:
    """Return the parameters that nodes read, by name, in the order of the model."""
    held = {
        str(source.target)
        for node in nodes
        for source in node.all_input_nodes
        if source.op == "get_attr"
    }
    return {name: p for name, p in graph.named_parameters() if name in held}


def has_bias(linear: Node) -> bool:
    """Tell whether a linear layer adds a bias."""
    return len(linear.args) > 2 and linear.args[2] is not None  # noqa: PLR2004  (input, weight, bias)


def _shape(operand: Argument) -> Sequence[int]:
    assert isinstance(operand, Node)
    shape: Sequence[int] = operand.meta["val"].shape
    return shape


def _products(nodes: list[Node], roles: dict[str, Role], where: str) -> tuple[Node, Node, Node]:
    """Return a block's attention, the row layer that it feeds, and the feed-forward's."""
    attentions = [node for node in nodes if node.target is _ATTENTION]
    if len(attentions) != 1:
        raise ValueError(
            f"{where} calls scaled_dot_product_attention {len(attentions)} times; the planner "
            "takes blocks that call it once"
        )
    rows = [
        node
        for node in nodes
        if node.target is _aten.linear.default
        and roles.get(parameter_name(node.args[1]), Role(part=Part.REPLICATED)).part is Part.ROW
    ]
    outputs = [row for row in rows if attentions[0] in _ancestors(row, until_linear=True)]
    others = [row for row in rows if row not in outputs]
    if len(outputs) != 1 or len(others) != 1:
        raise ValueError(
            f"{where} has {len(outputs)} layers after attention and {len(others)} feed-forward "
            "parts whose products ranks can share by rows; the planner takes one of each"
        )
    return attentions[0], outputs[0], others[0]


def _ancestors(
    node: Node, *, within: set[Node] | None = None, until_linear: bool = False
) -> set[Node]:
    """Return what a node is computed from: inside of a set, or up to linear layers."""
    found: set[Node] = set()
    waiting = list(node.all_input_nodes)
    while waiting:
        current = waiting.pop()
        if current in found or (within is not None and current not in within):
            continue
        found.add(current)
        if not (until_linear and current.target is _aten.linear.default):
            waiting.extend(current.all_input_nodes)
    return found


def _is_norm(node: Node, rank: int) -> bool:
    """Tell whether a node normalises a value of so many dims, in one operation or spelled out."""
    if node.target not in (*_NORMS, _aten.rsqrt.default):
        return False
    return bool(node.meta["val"].dim() == rank)


def _num_vectors(node: Node) -> int:
    """Return how many vectors a norm applies: its operands, or one beside a spelled-out root."""
    if node.target in _NORMS:
        return sum(source.op == "get_attr" for source in node.all_input_nodes)
    products = _following_products(node)
    return int(any(_reads_vector(product) for product in products))


def _following_products(node: Node) -> list[Node]:
    """Return the products around a spelled-out norm: x * rsqrt(...), and that times a vector."""
    first = [user for user in node.users if user.target is _aten.mul.Tensor]
    second = [
        near
        for product in first
        for near in (*product.all_input_nodes, *product.users)
        if near.target in (_aten.mul.Tensor, _aten.to.dtype)
    ]
    third = [near for node in second for near in node.users if near.target is _aten.mul.Tensor]
    return [*first, *second, *third]


def _reads_vector(node: Node) -> bool:
    return node.target is _aten.mul.Tensor and any(
        source.op == "get_attr" and source.meta["val"].dim() == 1 for source in node.all_input_nodes
    )


def _has(nodes: list[Node], target: object) -> bool:
    return any(node.target is target for node in nodes)
