"""Capture a few layers of a model and repeat them: tracing 80 equal layers takes a minute.

Layers of one kind differ in nothing but the names of their weights. So a model of two layers (of
each kind, where there are dense ones and ones with experts) is traced, and the last one of a kind
is repeated in the graph as often as the whole model has it, each time under the names of its own
layer and behind the one before it. A test compares with the graph of the whole model, node by node.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx, nn
from torch.fx import GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule

from costmodels.model import ModelSpec
from runtime.capture.blocks import container_of, layer_of
from runtime.capture.export import capture
from runtime.models import build_model

_LEAST = 2  # layers: the second one shows what comes from the one before it


def capture_model(spec: ModelSpec, *, seq_len: int, dtype: torch.dtype) -> GraphModule:
    """Return the graph of a specified model and its summed loss, as `capture` does of a module.

    Args:
        spec: A model of a known family.
        seq_len: Tokens per sequence of the job.
        dtype: Of the parameters.

    Raises:
        ValueError: The family is not known, or has no module for what the model asks.

    """
    model = build_model(spec, seq_len=seq_len, dtype=dtype)
    first, second = _of_kinds(spec)
    few_first = min(first, _LEAST)
    few_second = min(second, 1 if first else _LEAST)
    if (few_first, few_second) == (first, second):
        return capture(model, dtype=dtype)
    short = capture(
        build_model(_with_layers(spec, few_first, few_second), seq_len=seq_len, dtype=dtype),
        dtype=dtype,
    )
    sources = (
        *(min(layer, few_first - 1) for layer in range(first)),
        *(few_first + min(layer, few_second - 1) for layer in range(second)),
    )
    return _repeated(short, model, sources)


def _of_kinds(spec: ModelSpec) -> tuple[int, int]:
    """Return how many layers lead without experts, and how many follow with them."""
    experts = sum(spec.layer_kind(layer).has_experts for layer in range(spec.num_layers))
    return spec.num_layers - experts, experts


def _with_layers(spec: ModelSpec, plain: int, experts: int) -> ModelSpec:
    moe = None if spec.moe is None else replace(spec.moe, num_dense_layers=plain)
    return replace(spec, num_layers=plain + experts, moe=moe)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """A captured graph in parts: what comes before the layers, each layer, what comes after."""

    container: str
    before: list[Node]
    layers: list[list[Node]]
    after: list[Node]


def _cut(graph: fx.Graph) -> _Cut:
    nodes = [node for node in graph.nodes if node.op != "get_attr"]
    container = container_of(n.meta["module"] for n in nodes if n.op == "call_function")
    assert container is not None, "a known family keeps its layers in a list"
    places = [layer_of(node.meta.get("module") or "", container) for node in nodes]
    inside = [i for i, layer in enumerate(places) if layer >= 0]
    begin, end = inside[0], inside[-1] + 1
    assert places[begin:end] == sorted(places[begin:end]), "layers run one after the other"
    layers: list[list[Node]] = [[] for _ in range(places[end - 1] + 1)]
    for node, layer in zip(nodes[begin:end], places[begin:end], strict=True):
        layers[layer].append(node)
    return _Cut(container=container, before=nodes[:begin], layers=layers, after=nodes[end:])


def _repeated(short: GraphModule, model: nn.Module, sources: tuple[int, ...]) -> GraphModule:
    """Return the graph of a model whose layers are those of a shorter one.

    Args:
        short: The shorter one's graph.
        model: The whole model; its parameters lie on meta.
        sources: For each layer of the whole model, the one of the shorter that it is like.

    """
    cut = _cut(short.graph)
    graph = fx.Graph()
    attributes = dict(_attributes(short, model, cut.container, sources))
    reads = {name: _attribute(graph, name, node) for name, (node, _) in attributes.items()}
    copies: dict[Node, Node] = {}

    def copy(node: Node, source: int = -1, layer: int = -1) -> None:
        for argument in node.all_input_nodes:
            if argument.op == "get_attr":
                name = _renamed(str(argument.target), cut.container, source, layer)
                copies[argument] = reads[name]
        copies[node] = graph.node_copy(node, lambda old: copies[old])
        path = _renamed(node.meta.get("module") or "", cut.container, source, layer)
        copies[node].meta = {"val": node.meta.get("val"), "module": path}

    for node in cut.before:
        copy(node)
    newest: Node | None = None
    for layer, source in enumerate(sources):
        if newest is not None and source:  # whichever layer came before, it stands for the last
            copies[cut.layers[source - 1][-1]] = newest
        for node in cut.layers[source]:
            copy(node, source, layer)
        newest = copies[cut.layers[source][-1]]
    for node in cut.after:
        copy(node)
    values = {name: value for name, (_, value) in attributes.items()}
    whole = _LazyGraphModule(values, graph, class_name="Captured")
    whole.meta.update(short.meta)
    return whole


def _attributes(
    short: GraphModule, model: nn.Module, container: str, sources: tuple[int, ...]
) -> Iterator[tuple[str, tuple[Node, object]]]:
    """Return what the whole graph reads by name: a node of the short one like it, and its value.

    In the order of the model, as in a graph of the whole; constants of the code come last.
    """
    alike: dict[str, Node] = {}
    for node in short.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        source = layer_of(name, container)
        layers = [i for i, of in enumerate(sources) if of == source] if source >= 0 else [-1]
        alike |= {_renamed(name, container, source, layer): node for layer in layers}
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if name in alike:
            yield name, (alike.pop(name), value)
    for name, node in alike.items():
        owner, _, leaf = name.rpartition(".")
        yield name, (node, getattr(short.get_submodule(owner), leaf))


def _attribute(graph: fx.Graph, name: str, like: Node) -> Node:
    node = graph.create_node("get_attr", name)
    node.meta = {"val": like.meta["val"], "module": name.rpartition(".")[0]}
    return node


def _renamed(path: str, container: str, source: int, layer: int) -> str:
    """Return the path of a module or weight of one layer as that of another."""
    prefix = f"{container}.{source}"
    if source < 0 or not (path == prefix or path.startswith(f"{prefix}.")):
        return path
    return f"{container}.{layer}{path.removeprefix(prefix)}"
