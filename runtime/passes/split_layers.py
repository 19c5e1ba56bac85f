"""Cut the graph into units: what comes before the layers, each layer, what comes after.

    before    one graph of n nodes
    after     shared = call_module(shared, ids, positions)            no weights: sizes, rope tables
              hidden = call_module(units.0, mesh, ids)                embedding
              hidden = call_module(units.1, hidden, shared[0], ...)   a layer
              ...
              loss   = call_module(units.n, mesh, hidden, labels)     head

A layer is the index in the path of the module that made a node (`model.layers.3.mlp`). What holds
no weights is computed once and shared; of what does, one value crosses from unit to unit. A stage
of the pipeline is a run of units.
"""

from itertools import pairwise

from torch import Tensor, fx, nn
from torch.fx import GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule

from runtime.capture.blocks import container_of, layer_of
from runtime.passes.pipeline import LoweringContext

SHARED = "shared"


def split_layers(graph: GraphModule, context: LoweringContext) -> GraphModule:
    """Make one graph module per embedding, layer and head, and a top graph that calls them.

    Raises:
        ValueError: No layers repeat, there are others than the plan has, or more than one value
            crosses from a layer to the next.

    """
    if any(node.op == "call_module" for node in graph.graph.nodes):
        return graph
    trained = _trained_nodes(graph)
    unit_of = _assign_units(graph, trained, sum(context.layout.layers_per_stage))
    shared = [
        node
        for node in graph.graph.nodes
        if node.op == "call_function"
        and node not in trained
        and any(user in trained for user in node.users)
    ]
    top = _Top(graph)
    top.add_shared(shared)
    for unit in range(max(unit_of.values()) + 1):
        top.add_unit(unit, [node for node in graph.graph.nodes if unit_of.get(node) == unit])
    return top.finish()


def only_activations_cross_units(graph: GraphModule, context: LoweringContext) -> None:
    """Units form a chain, shared values hold no weights, layers are as many as planned."""
    assert not list(graph.get_submodule(SHARED).parameters()), "shared values depend on weights"
    calls = [node for node in graph.graph.nodes if node.op == "call_module"]
    units = [node for node in calls if node.target != SHARED]
    assert len(units) == sum(context.layout.layers_per_stage) + 2
    for previous, unit in pairwise(units):
        crossing = [source for source in unit.all_input_nodes if source in units]
        assert crossing == [previous], f"{unit.target} reads {crossing}"


def _trained_nodes(graph: GraphModule) -> set[Node]:
    """Return the nodes that depend on parameters (parameters themselves left out)."""
    parameters = {name for name, _ in graph.named_parameters()}
    weights = {n for n in graph.graph.nodes if n.op == "get_attr" and n.target in parameters}
    found: set[Node] = set()
    for node in graph.graph.nodes:
        if node.op == "call_function" and any(
            source in found or source in weights for source in node.all_input_nodes
        ):
            found.add(node)
    return found


def _assign_units(graph: GraphModule, trained: set[Node], num_layers: int) -> dict[Node, int]:
    """Map each trained node to 0 (before the layers), 1 + layer, or num_layers + 1 (after)."""
    container = _container(trained)
    unit_of: dict[Node, int] = {}
    for node in graph.graph.nodes:
        if node not in trained:
            continue
        index = layer_of(node.meta["module"], container)
        reached = max((unit_of[i] for i in node.all_input_nodes if i in unit_of), default=0)
        own = index + 1 if index >= 0 else (num_layers + 1 if reached else 0)
        # A transposed weight has no inputs that tell where it belongs; its only user does.
        unit_of[node] = max(own, reached)
    layers = {unit for unit in unit_of.values() if 0 < unit <= num_layers}
    found = max((layer_of(node.meta["module"], container) + 1 for node in trained), default=0)
    if found != num_layers or len(layers) != num_layers:
        raise ValueError(f"the model has {found} layers in {container!r}, the plan {num_layers}")
    return unit_of


def _container(trained: set[Node]) -> str:
    """Return the path of the module list that holds the layers."""
    container = container_of(node.meta["module"] for node in trained)
    if container is None:
        raise ValueError("the model has no repeated layers to cut at")
    return container


class _Top:
    """The graph that calls the units, while it is made."""

    def __init__(self, source: GraphModule) -> None:
        self.source = source
        self.graph = fx.Graph()
        self.modules: dict[str, nn.Module] = {}
        self.values: dict[Node, Node] = {}
        self.hidden: Node | None = None
        self.hidden_source: Node | None = None
        self.passed: set[Node] = set()  # hidden states of earlier units
        for node in source.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self.graph.node_copy(node)

    def add_shared(self, outputs: list[Node]) -> None:
        """Compute what holds no weights, once."""
        needed = _closure(outputs)
        part, inputs, copies = self._part(needed)
        part.output(tuple(copies[node] for node in outputs))
        call = self._call(SHARED, part, inputs, "Shared")
        names = []
        for i, node in enumerate(outputs):
            self.values[node] = self.graph.call_function(_item, (call, i))
            self.values[node].meta = dict(node.meta)
            names.append(node.name)
        call.meta["outputs"] = tuple(names)

    def add_unit(self, unit: int, nodes: list[Node]) -> None:
        """Call the next unit with the hidden state and what else it reads."""
        part, inputs, copies = self._part(nodes)
        crossing = [node for node in nodes if any(user not in copies for user in node.users)]
        if len(crossing) != 1:
            names = ", ".join(node.name for node in crossing)
            raise ValueError(
                f"{len(crossing)} values leave unit {unit} ({names}); the pipeline sends one"
            )
        part.output(copies[crossing[0]])
        call = self._call(f"units.{unit}", part, inputs, f"Unit{unit}")
        call.meta["val"] = crossing[0].meta["val"]
        call.meta["placement"] = crossing[0].meta["placement"]
        if self.hidden_source is not None:
            self.passed.add(self.hidden_source)
        self.hidden, self.hidden_source = call, crossing[0]
        self.values[crossing[0]] = call

    def finish(self) -> GraphModule:
        """Return the module that runs the chain."""
        assert self.hidden is not None
        self.graph.output(self.hidden)
        root = nn.Module()
        units = nn.ModuleList()
        for name, module in self.modules.items():
            if name == SHARED:
                root.add_module(name, module)
            else:
                units.append(module)
        root.add_module("units", units)
        top = _LazyGraphModule(root, self.graph, class_name="Lowered")
        top.meta = dict(self.source.meta)
        return top

    def _part(self, nodes: list[Node]) -> tuple[fx.Graph, list[Node], dict[Node, Node]]:
        """Copy nodes into a graph of their own; what they read from outside becomes an input."""
        inside = set(nodes)
        outside = {source for node in nodes for source in node.all_input_nodes} - inside
        inputs = [n for n in self.source.graph.nodes if n in outside and n in self.values]
        part = fx.Graph()
        copies: dict[Node, Node] = {}
        for node in inputs:
            name = "hidden" if node is self.hidden_source else node.name
            copies[node] = part.placeholder(name)
            copies[node].meta = dict(node.meta)
        for node in self.source.graph.nodes:
            if node in inside or (node in outside and node.op == "get_attr"):
                copies[node] = part.node_copy(node, lambda old: copies[old])
        skipping = [n for n in outside if n not in copies or n in self.passed]
        if skipping:
            names = ", ".join(sorted(node.name for node in skipping))
            raise ValueError(
                f"{names} would have to skip a layer to reach {nodes[0].name}; "
                "a pipeline sends a value to the next stage only"
            )
        return part, inputs, copies

    def _call(self, name: str, part: fx.Graph, inputs: list[Node], class_name: str) -> Node:
        attributes = {
            str(node.target): _get(self.source, str(node.target))
            for node in part.nodes
            if node.op == "get_attr"
        }
        self.modules[name] = _LazyGraphModule(attributes, part, class_name=class_name)
        call = self.graph.create_node(
            "call_module", name, tuple(self.values[node] for node in inputs)
        )
        placeholders = [node.target for node in part.nodes if node.op == "placeholder"]
        call.meta = {"inputs": tuple(placeholders), "placement": None, "val": None}
        return call


def _item(values: tuple[object, ...], index: int) -> object:
    """Return one of the shared values."""
    return values[index]


def _closure(nodes: list[Node]) -> list[Node]:
    """Return nodes and all that they are computed from, placeholders left out."""
    found: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found and node.op != "placeholder":
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return sorted(found)


def _get(graph: GraphModule, name: str) -> Tensor:
    owner, _, leaf = name.rpartition(".")
    value = getattr(graph.get_submodule(owner), leaf)
    assert isinstance(value, Tensor)
    return value
