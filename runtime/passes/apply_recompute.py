"""Choose what the backward pass computes again, and which kernel attends.

    full          the first `recompute_layers` layers of each stage keep their input only
    selective     attention keeps queries, keys and values; scores and output are made again
    none          autograd keeps what it needs

Torch's own fused kernel stays where values are as wide as keys. With fused attention `selective`
saves only the kernel's output and its row statistics. Attention over a split sequence has its own
forms, which bring keys and values once more.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from costmodels.layout import Layout, Recompute
from runtime.ops import attention
from runtime.passes.pipeline import LoweringContext, all_nodes
from runtime.passes.split_context import RECOMPUTED
from runtime.passes.split_layers import SHARED

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def apply_recompute(graph: GraphModule, context: LoweringContext) -> GraphModule:
    """Mark the layers to recompute, and give attention the plan's form."""
    chosen = recomputed_units(context.layout)
    for node in _unit_calls(graph):
        node.meta["recompute"] = node.target in chosen
    for node in all_nodes(graph):
        if node.target is _ATTENTION and not _is_torchs_own(node, context):
            node.target = _attention_function(context)
            node.args = node.args[:3]
            node.kwargs = {"scale": node.kwargs["scale"]} if "scale" in node.kwargs else {}
        elif node.target in RECOMPUTED and context.layout.recompute is Recompute.SELECTIVE:
            node.target = RECOMPUTED[node.target]
    return graph


def recomputed_layers_match_the_layout(graph: GraphModule, context: LoweringContext) -> None:
    """As many layers of each stage are recomputed as the plan says, and attention is its form."""
    marked = {node.target for node in _unit_calls(graph) if node.meta["recompute"]}
    assert marked == recomputed_units(context.layout)
    for node in all_nodes(graph):
        if node.target in (_ATTENTION, *attention.FORMS):
            own = _is_torchs_own(node, context)
            wanted = _ATTENTION if own else _attention_function(context)
            assert node.target is wanted, f"{node} attends by {node.target}"
    split = {n.target for n in all_nodes(graph)} & {*RECOMPUTED, *RECOMPUTED.values()}
    selective = context.layout.recompute is Recompute.SELECTIVE
    allowed = set(RECOMPUTED.values() if selective else RECOMPUTED)
    assert split <= allowed, f"attention over a split sequence runs as {split}"


def recomputed_units(layout: Layout) -> set[str]:
    """Return the names of the units whose activations are not kept."""
    if layout.recompute is not Recompute.FULL:
        return set()
    chosen, first = set(), 1  # unit 0 is the embedding
    for num_layers in layout.layers_per_stage:
        count = min(layout.recompute_layers or num_layers, num_layers)
        chosen |= {f"units.{unit}" for unit in range(first, first + count)}
        first += num_layers
    return chosen


def _attention_function(context: LoweringContext) -> Callable[..., Tensor]:
    """Return what stands for attention in the graph, where that is not torch's own."""
    selective = context.layout.recompute is Recompute.SELECTIVE
    if context.flash_attention:
        return attention.recomputed_attention if selective else attention.fused_attention
    return attention.recomputed_unfused_attention if selective else attention.unfused_attention


def _is_torchs_own(node: Node, context: LoweringContext) -> bool:
    """Whether torch's function runs as one fused kernel, which is what the plan asks for."""
    query, _, value = node.args[:3]  # by place: keys may be the values
    assert isinstance(query, Node)
    assert isinstance(value, Node)
    is_even = query.meta["val"].shape[-1] == value.meta["val"].shape[-1]
    selective = context.layout.recompute is Recompute.SELECTIVE
    return context.flash_attention and not selective and is_even


def _unit_calls(graph: GraphModule) -> list[Node]:
    return [n for n in graph.graph.nodes if n.op == "call_module" and n.target != SHARED]
