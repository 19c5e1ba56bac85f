"""Let attention see the whole sequence where the context axis splits it.

    ring         out = ring_attention(q, k, v, mesh)
    all-gather   out = gathered_attention(q, k, v, mesh)
    ulysses      out = to_tokens(attention(to_heads(q), to_heads(k), to_heads(v)), mesh)

Nothing else mixes tokens, so nothing else changes: the batch holds a rank's share of the tokens
with their positions (`runtime/context.py`), sizes in the graph are those of the share, and the loss
is a sum. Heads stay cut over the tensor axis as they are.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from costmodels.layout import ContextParallelType, Layout
from runtime.ops.attention import FORMS
from runtime.ops.gathered_attention import gathered_attention, recomputed_gathered_attention
from runtime.ops.ring_attention import recomputed_ring_attention, ring_attention
from runtime.ops.ulysses_attention import to_heads, to_tokens
from runtime.passes.pipeline import LoweringContext, all_nodes

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_WHOLE: dict[ContextParallelType, Callable[..., Tensor]] = {
    ContextParallelType.RING: ring_attention,
    ContextParallelType.ALL_GATHER: gathered_attention,
}
RECOMPUTED = {
    ring_attention: recomputed_ring_attention,
    gathered_attention: recomputed_gathered_attention,
}


def split_context(graph: GraphModule, context: LoweringContext) -> GraphModule:
    """Replace attention by the form of the layout.

    Raises:
        ValueError: The form has no kernel without fused attention, or the model takes the first
            rows of a table as its positions.

    """
    if context.layout.context_parallel == 1:
        return graph
    kind = context.layout.context_parallel_type
    if kind in _WHOLE and not context.flash_attention:
        raise ValueError(
            f"context parallelism of type {kind} merges what fused kernels return; without flash "
            f"attention it is {ContextParallelType.ULYSSES} (--cp-type) or none"
        )
    _refuse_first_rows(graph)
    (mesh,) = graph.graph.find_nodes(op="placeholder", target="mesh")
    for node in graph.graph.find_nodes(op="call_function", target=_ATTENTION):
        if kind in _WHOLE:
            node.target = _WHOLE[kind]
            node.args = (*node.args[:3], mesh)
            node.kwargs = {k: v for k, v in node.kwargs.items() if k == "scale"}
        else:
            _exchange_around(graph, node, mesh)
    return graph


def _refuse_first_rows(graph: GraphModule) -> None:
    for name in sliced_tables(graph):
        raise ValueError(
            f"{name} is sliced to the length of a sequence, of which a rank of the context axis "
            "holds a share: take its rows by position_ids, or use --cp 1"
        )


def sliced_tables(graph: GraphModule) -> list[str]:
    """Return the tables that are sliced to the length: every rank would take the first rows."""
    slices = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor)
    return [
        str(node.args[0].target)
        for node in slices
        if node.args[0].op == "get_attr" and len(node.all_input_nodes) > 1
    ]


def attention_sees_the_whole_sequence(graph: GraphModule, context: LoweringContext) -> None:
    """No attention works on a share of the sequence alone."""
    if context.layout.context_parallel == 1:
        return
    for node in all_nodes(graph):
        if node.target in (_ATTENTION, *FORMS):
            sources = {source.target for source in node.all_input_nodes}
            assert _is_ulysses(context.layout), f"{node.name} sees its own tokens only"
            assert sources == {to_heads}, f"{node.name} reads {sources}"


def _is_ulysses(layout: Layout) -> bool:
    return layout.context_parallel_type is ContextParallelType.ULYSSES


def _exchange_around(graph: GraphModule, node: Node, mesh: Node) -> None:
    """Put exchanges before and after an attention, unless they are there."""
    inputs = node.all_input_nodes
    if any(source.target is to_heads for source in inputs):
        return
    for source in inputs:
        with graph.graph.inserting_before(node):
            heads = graph.graph.call_function(to_heads, (source, mesh))
        heads.meta = dict(source.meta)
        node.replace_input_with(source, heads)
    with graph.graph.inserting_after(node):
        tokens = graph.graph.call_function(to_tokens, (node, mesh))
    tokens.meta = dict(node.meta)
    node.replace_all_uses_with(tokens, delete_user_cb=lambda user: user is not tokens)
