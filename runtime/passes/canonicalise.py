"""Bring a captured graph into the few forms that the other passes know.

    arange(s, device="meta")                      arange(s, device=input_ids.device)
    to(x, device, dtype), slice(x, 0, s), dropout(x, 0.0)      a cast, or nothing
    view -> addmm(bias, x, weight) -> view        linear(x, t(weight), bias)
    arange(length), outside of masks              position_ids[0]
    unflatten(x, -1, [heads, d])                  reshape(x, [b, s, heads, d])
    sdpa(q, k, v, attn_mask=causal mask)          sdpa(q, k, v, is_causal=True)
    sdpa(q, repeat(k), repeat(v))                 sdpa(q, k, v, enable_gqa=True)
    aten.rms_norm over the last dim               ops.norm.rms_norm, which keeps less

A mask is proved causal by computing it: the nodes that make it hold no weights, so they run on a
small batch whose positions count from 0.
"""

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import GraphModule, Node

from runtime.ops import norm
from runtime.passes.pipeline import LoweringContext, all_nodes

_aten = torch.ops.aten
_ATTENTION = _aten.scaled_dot_product_attention.default
_VIEWS = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)  # noqa: SLF001
_CASTS = (_aten.to.dtype, _aten.to.device, _aten.to.dtype_layout, _aten.to.other)
_COUNTS = (_aten.arange.default, _aten.arange.start)
_END = 2**63 - 1  # how torch writes "to the end"
_SAMPLE_SHAPE = (2, 5)


def canonicalise(graph: GraphModule, context: LoweringContext) -> GraphModule:
    """Rewrite what is written in many ways into one; numbers do not change.

    Raises:
        ValueError: The model draws random numbers, or attends with a mask that is not causal.

    """
    del context
    for node in list(graph.graph.nodes):
        if node.op == "call_function":
            _drop_device(graph.graph, node)
            _drop_no_op(node)
            if node.target is _aten.unflatten.int:
                _write_as_view(graph.graph, node)
    for node in list(graph.graph.nodes):
        if node.target is _aten.addmm.default:
            _merge_linear(graph.graph, node)
        elif node.target is _ATTENTION:
            _normalise_attention(graph, node)
        elif node.target is _aten.rms_norm.default and _is_weighted_norm(node):
            node.target = norm.rms_norm
    graph.graph.eliminate_dead_code()
    for node in list(graph.graph.nodes):  # those of masks are gone
        if node.target in _COUNTS:
            _read_positions(graph.graph, node)
    graph.graph.eliminate_dead_code()
    return graph


def only_canonical_operations(graph: GraphModule, context: LoweringContext) -> None:
    """No device is written into the graph, nothing is random, attention is causal by flag."""
    del context
    for node in all_nodes(graph):
        devices = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, torch.device)]
        assert not devices, f"{node.format_node()} names a device"
        assert node.target is not _aten.dropout.default, f"{node.name} draws random numbers"
        if node.target is _ATTENTION:
            _, mask, _, is_causal = _attention_arguments(node)
            assert mask is None, f"{node.name} has a mask"
            assert is_causal, f"{node.name} is not causal"


# Devices and no-ops.


def _drop_device(graph: fx.Graph, node: Node) -> None:
    """Let constants be made where the batch is, and casts change nothing but the dtype."""
    if node.target in _CASTS:
        source = node.args[0]
        assert isinstance(source, Node)
        dtype = node.meta["val"].dtype
        node.target = _aten.to.dtype
        node.args, node.kwargs = (source, dtype), {}
    elif isinstance(node.kwargs.get("device"), torch.device):
        kwargs = {key: value for key, value in node.kwargs.items() if key != "pin_memory"}
        node.kwargs = {**kwargs, "device": _batch_device(graph)}


def _read_positions(graph: fx.Graph, node: Node) -> None:
    """Let a model that counts positions up to the length read the batch's, which may be a share."""
    tokens, positions, *_ = (n for n in graph.nodes if n.op == "placeholder")
    *start, end = node.args[:2]
    size = end.meta.get("val") if isinstance(end, Node) else None
    if str(size) != str(tokens.meta["val"].shape[1]) or any(start):
        return
    with graph.inserting_before(node):
        first = graph.call_function(_aten.select.int, (positions, 0, 0))
        first.meta = {**node.meta, "val": positions.meta["val"][0]}
        cast = graph.call_function(_aten.to.dtype, (first, node.meta["val"].dtype))
        cast.meta = dict(node.meta)
    node.replace_all_uses_with(cast)


def _batch_device(graph: fx.Graph) -> Node:
    """Return the node that asks the batch for its device, made at first use."""
    tokens: Node = next(node for node in graph.nodes if node.op == "placeholder")
    for user in tokens.users:
        if user.target is getattr:
            return user
    last = next(node for node in reversed(graph.nodes) if node.op == "placeholder")
    with graph.inserting_after(last):
        device = graph.call_function(getattr, (tokens, "device"))
    device.meta = {"val": None, "module": ""}
    return device


def _drop_no_op(node: Node) -> None:
    if node.target is _aten.dropout.default and node.args[1] and node.args[2]:
        raise ValueError(
            f"{node.meta['module']} drops out with probability {node.args[1]}; the runtime trains "
            "without dropout: set it to 0 in the model's configuration"
        )
    source = node.args[0] if node.args else None
    if isinstance(source, Node) and _is_no_op(node, source):
        node.replace_all_uses_with(source)
        node.graph.erase_node(node)  # dead code elimination keeps what is marked as random


def _is_no_op(node: Node, source: Node) -> bool:
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return False
    if node.target is _aten.to.dtype:
        return bool(before.dtype == after.dtype)
    if node.target is _aten.slice.Tensor:
        return node.args[2:] == (0, _END)
    return node.target in (_aten.dropout.default, _aten.alias.default)


def _write_as_view(graph: fx.Graph, node: Node) -> None:
    """Spell out all sizes of what splits one dim."""
    source, dim, sizes = node.args
    assert isinstance(source, Node)
    assert isinstance(dim, int)
    assert isinstance(sizes, (list, tuple))
    before = source.meta["val"].shape
    dim %= len(before)
    with graph.inserting_before(node):
        shape: list[Any] = [_size(graph, source, i) for i in range(len(before))]
    shape[dim : dim + 1] = sizes
    node.target, node.args = _aten.reshape.default, (source, shape)


def _size(graph: fx.Graph, source: Node, dim: int) -> int | Node:
    size = source.meta["val"].shape[dim]
    if isinstance(size, int):
        return size
    node = graph.call_function(_aten.sym_size.int, (source, dim))
    node.meta = {"val": size, "module": source.meta["module"]}
    return node


# Linear layers.


def _merge_linear(graph: fx.Graph, node: Node) -> None:
    """Write a matrix product over flattened tokens as a linear layer over the tokens' own shape."""
    bias, flat, weight = node.args
    users = list(node.users)
    assert isinstance(flat, Node)
    if flat.target not in _VIEWS or len(users) != 1 or users[0].target not in _VIEWS:
        return
    source, result = flat.args[0], users[0]
    assert isinstance(source, Node)
    if source.meta["val"].shape[:-1] != result.meta["val"].shape[:-1]:
        return
    assert isinstance(weight, Node)
    with graph.inserting_before(node):
        turned = graph.call_function(_aten.t.default, (weight,))
        linear = graph.call_function(_aten.linear.default, (source, turned, bias))
    turned.meta = {"val": weight.meta["val"].t(), "module": node.meta["module"]}
    linear.meta = dict(result.meta)
    result.replace_all_uses_with(linear)


def _is_weighted_norm(node: Node) -> bool:
    """Tell whether a norm has a weight, an epsilon and one dim."""
    match node.args:
        case (_, [_], Node(), float()):
            return True
    return False


# Attention.


def _attention_arguments(node: Node) -> tuple[tuple[Node, ...], object, float, bool]:
    """Return (query, key, value), mask, dropout probability, is_causal."""
    names = ("attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, node.args[3:], strict=False))
    given |= {name: value for name, value in node.kwargs.items() if name in names}
    tensors = tuple(a for a in node.args[:3] if isinstance(a, Node))
    mask = given.get("attn_mask")
    return tensors, mask, float(given.get("dropout_p", 0.0)), bool(given.get("is_causal", False))  # type: ignore[arg-type]


def _normalise_attention(graph: GraphModule, node: Node) -> None:
    (query, key, value), mask, dropout, is_causal = _attention_arguments(node)
    where = node.meta["module"]
    if dropout:
        raise ValueError(f"{where} drops out attention with probability {dropout}; set it to 0")
    if isinstance(mask, Node) and not is_causal:
        is_causal = _is_causal_mask(graph, mask)
    if not is_causal:
        raise ValueError(f"{where} attends with a mask that is not causal; it cannot be trained")
    kept: dict[str, Any] = {
        name: node.kwargs[name] for name in ("scale", "enable_gqa") if name in node.kwargs
    }
    sources = _unrepeated(key), _unrepeated(value)
    if all(sources):
        key, value = sources  # type: ignore[assignment]
        kept["enable_gqa"] = True
    node.args = (query, key, value, None, 0.0, True)
    node.kwargs = kept


def _is_causal_mask(graph: GraphModule, mask: Node) -> bool:
    """Compute a mask on a small batch: does it show each token itself and what lies before?"""
    small = fx.Graph()
    copies: dict[Node, Node] = {}
    needed = {mask, *_ancestors(mask)}
    attributes = {}
    for node in graph.graph.nodes:
        if node.op == "get_attr" and node in needed:
            attributes[node.target] = _attribute(graph, node.target)
        if node.op == "placeholder" or node in needed:
            copies[node] = small.node_copy(node, lambda old: copies[old])
    small.output(copies[mask])
    tokens = torch.zeros(_SAMPLE_SHAPE, dtype=torch.long)
    positions = torch.arange(_SAMPLE_SHAPE[1]).expand(_SAMPLE_SHAPE)
    computed = GraphModule(attributes, small)(tokens, positions, tokens)
    visible = computed if computed.dtype == torch.bool else computed == 0
    return bool((visible == torch.ones(_SAMPLE_SHAPE[1], _SAMPLE_SHAPE[1]).tril().bool()).all())


def _ancestors(node: Node) -> set[Node]:
    found: set[Node] = set()
    waiting = list(node.all_input_nodes)
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting.extend(current.all_input_nodes)
    return found


def _attribute(graph: GraphModule, name: str) -> Tensor:
    owner, _, leaf = name.rpartition(".")
    value = getattr(graph.get_submodule(owner), leaf)
    assert isinstance(value, Tensor)
    return value


def _unrepeated(node: Node) -> Node | None:
    """Return the heads before `repeat_interleave` written as unsqueeze, expand, reshape."""
    chain = []
    for target in (_VIEWS, (_aten.expand.default,), (_aten.unsqueeze.default,)):
        if node.target not in target or len(node.users) != 1 or not isinstance(node.args[0], Node):
            return None
        chain.append(node)
        node = node.args[0]
    repeats_heads = chain[-1].args[1] == 2 and chain[0].meta["val"].dim() == 4  # noqa: PLR2004
    return node if repeats_heads else None
