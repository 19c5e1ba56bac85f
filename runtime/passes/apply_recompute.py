"""Choose what the backward pass computes again, and which kernel attends.

    full          the first `recompute_layers` layers of each stage keep their input only
    selective     attention keeps queries, keys and values; scores and output are made again
    none          autograd keeps what it needs

With fused attention `selective` saves only the kernel's output and its row statistics. Attention
over a split sequence has its own forms, which bring keys and values once more.
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
    function = _attention_function(context)
    for node in all_nodes(graph):
        if node.target is _ATTENTION and function is not None:
            node.target = function
            node.args = node.args[:3]
            node.kwargs = {"scale": node.kwargs["scale"]} if "scale" in node.kwargs else {}
        elif node.target in RECOMPUTED and context.layout.recompute is Recompute.SELECTIVE:
            node.target = RECOMPUTED[node.target]
    return graph


def recomputed_layers_match_the_layout(graph: GraphModule, context: LoweringContext) -> None:
    """As many layers of each stage are recomputed as the plan says, and attention is its form."""
    marked = {node.target for node in _unit_calls(graph) if node.meta["recompute"]}
    assert marked == recomputed_units(context.layout)
    function = _attention_function(context)
    kernels = {
        node.target for node in all_nodes(graph) if node.target in (_ATTENTION, *attention.FORMS)
    }
    assert kernels <= {function or _ATTENTION}, f"attention runs as {kernels}"
    split = {n.target for n in all_nodes(graph)} & {*RECOMPUTED, *RECOMPUTED.values()}
    selective = context.layout.recompute is Recompute.SELECTIVE
    wanted = set(RECOMPUTED.values() if selective else RECOMPUTED)
    assert split <= wanted, f"attention over a split sequence runs as {split}"


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


def _attention_function(context: LoweringContext) -> Callable[..., Tensor] | None:
    """Return what stands for attention in the graph; None keeps torch's own."""
    selective = context.layout.recompute is Recompute.SELECTIVE
    if context.flash_attention:
        return attention.recomputed_attention if selective else None
    return attention.recomputed_unfused_attention if selective else attention.unfused_attention


def _unit_calls(graph: GraphModule) -> list[Node]:
    return [n for n in graph.graph.nodes if n.op == "call_module" and n.target != SHARED]
