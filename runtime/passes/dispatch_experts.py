"""Spread the experts of a layer over ranks, and send tokens to them.

    before    y = meshwright::experts(x, router, correction, gate_up, down, ...)
                  gate_up [E, 2 F, H], down [E, H, F]
    after     y = dispatched_experts(x, router, correction, gate_up, down, mesh, ..., load, ...)
                  gate_up [E / ep, 2 F / etp, H], down [E / ep, H, F / etp]

The axes fold over data, context and tensor of a stage (`communication/grid.py`); what tokens a rank
routes was settled by `shard_tensors`. Experts are no copies on the tensor axis, so nothing is
summed over it.
"""

from dataclasses import replace

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from costmodels.layout import Layout
from runtime.ops.experts import dispatched_experts
from runtime.passes.pipeline import LoweringContext, all_nodes
from runtime.program import TOKEN_WEIGHT, ParameterShard

LOAD = "expert_load"  # buffer of a router: choices of each expert since the last update
DROPPED = "expert_drops"  # buffer of a router with a capacity: choices dropped, and all, of a step
_WHOLE = torch.ops.meshwright.experts.default


def dispatch_experts(graph: GraphModule, context: LoweringContext) -> GraphModule:
    """Put the exchange of tokens in the place of whole expert blocks.

    Raises:
        ValueError: The experts, or the width of one, do not divide over their axes.

    """
    if not any(node.target is _WHOLE for node in graph.graph.nodes):
        return graph
    mesh = next(node for node in graph.graph.nodes if node.target == "mesh")
    with graph.graph.inserting_after(mesh):
        weight = graph.graph.placeholder(TOKEN_WEIGHT)
    weight.meta = {"val": None, "module": "", "placement": mesh.meta["placement"]}
    for node in graph.graph.nodes:
        if node.target is _WHOLE:
            gate_up, down = _weights(node)
            # Rows of both input matrices are cut side by side, columns of the output matrix.
            _cut(graph, gate_up, context.layout, dim=1, num_segments=2)
            _cut(graph, down, context.layout, dim=2, num_segments=1)
            node.target = dispatched_experts
            load = None if node.args[2] is None else _load(graph, node)
            node.args = (*node.args[:5], mesh, weight, load, *node.args[5:])
            if context.capacity_factor:
                drops = _counter(graph, node, node.args[1], DROPPED, 2)
                node.kwargs = {"capacity": context.capacity_factor, "dropped": drops}
    return graph


def every_token_reaches_its_experts(graph: GraphModule, context: LoweringContext) -> None:
    """No block is whole, and every rank holds its share of each one's experts."""
    layout = context.layout
    for node in all_nodes(graph):
        assert node.target is not _WHOLE, f"{node.name} keeps all experts on every rank"
        if node.target is dispatched_experts:
            for weight in _weights(node):
                shard = weight.meta["shard"]
                share = shard.global_shape[0] // layout.expert_parallel
                assert weight.meta["local"].shape[0] == share, f"{shard.name} is not spread"


def _load(graph: GraphModule, block: Node) -> Node:
    """Give a block whose choice is corrected a place to count choices in, beside the correction."""
    correction = block.args[2]
    assert isinstance(correction, Node)
    return _counter(graph, block, correction, LOAD, correction.meta["val"].shape[0])


def _counter(graph: GraphModule, block: Node, beside: Argument, name: str, size: int) -> Node:
    """Give a block a buffer of counts, in the module of one of its tensors."""
    assert isinstance(beside, Node)
    owner = str(beside.target).rpartition(".")[0]
    value = torch.zeros(size, dtype=torch.long)
    graph.get_submodule(owner).register_buffer(name, value)
    with graph.graph.inserting_before(block):
        counter = graph.graph.get_attr(f"{owner}.{name}")
    kept = {key: value for key, value in beside.meta.items() if key not in ("shard", "local")}
    counter.meta = {**kept, "val": value}
    return counter


def _weights(block: Node) -> tuple[Node, Node]:
    gate_up, down = block.args[3:5]
    assert isinstance(gate_up, Node)
    assert isinstance(down, Node)
    return gate_up, down


def _cut(graph: GraphModule, weight: Node, layout: Layout, *, dim: int, num_segments: int) -> None:
    shard = weight.meta["shard"]
    _require_divides(shard, 0, layout.expert_parallel, "expert_parallel")
    _require_divides(
        shard, dim, layout.expert_tensor_parallel * num_segments, "expert_tensor_parallel"
    )
    shard = replace(
        shard,
        dim=dim,
        axis="etp",
        num_segments=num_segments,
        block_axis="ep",
        padded_size=shard.global_shape[dim],
    )
    whole = weight.meta["local"]
    shape = shard.local_shape(layout.expert_tensor_parallel, layout.expert_parallel)
    local = torch.empty(shape, dtype=whole.dtype, device="meta")
    local = nn.Parameter(local, requires_grad=whole.requires_grad)
    owner, _, leaf = str(weight.target).rpartition(".")
    setattr(graph.get_submodule(owner), leaf, local)
    weight.meta["shard"], weight.meta["local"] = shard, local


def _require_divides(shard: ParameterShard, dim: int, ways: int, axis: str) -> None:
    size = shard.global_shape[dim]
    if size % ways:
        raise ValueError(f"{shard.name}: dim {dim} of {size} does not divide over {axis} ({ways})")
