"""Which ranks of a pipeline run equal programs: what one of them does need not be seen twice.

Middle stages hold equal layers: their graphs are the same node by node, under other names. A key
says all of a rank's program but names and the stages' numbers: whether a stage is the first or last
one, its units' graphs with shapes, placements and shards of weights, what is recomputed, and where
the rank stands on the other axes.
"""

from collections.abc import Hashable
from dataclasses import replace

from torch import Tensor, fx
from torch.fx import GraphModule, Node

from costmodels.layout import Layout
from runtime.communication.grid import coordinates
from runtime.lower import unit_names


class ProgramKeys:
    """Tells programs of one lowered plan apart."""

    def __init__(self, lowered: GraphModule, layout: Layout) -> None:
        """Look at a plan."""
        self._lowered = lowered
        self._layout = layout
        self._calls = {str(n.target): n for n in lowered.graph.nodes if n.op == "call_module"}
        self._units: dict[str, Hashable] = {}

    def key(self, rank: int) -> Hashable:
        """Return what is equal for two ranks if their programs are."""
        place = coordinates(self._layout, rank)
        stages = self._layout.stages_of_rank(place.pop("pp"))
        return tuple(sorted(place.items())), tuple(map(self._stage, stages))

    def _stage(self, stage: int) -> Hashable:
        ends = stage == 0, stage == self._layout.num_stages - 1
        return ends, tuple(map(self._unit, unit_names(self._layout, stage)))

    def _unit(self, name: str) -> Hashable:
        if name not in self._units:
            call = self._calls[name]
            unit = self._lowered.get_submodule(name)
            assert isinstance(unit, GraphModule)
            form = tuple(_forms(unit))
            self._units[name] = (call.meta["inputs"], call.meta["recompute"], form)
        return self._units[name]


def _forms(unit: GraphModule) -> list[str]:
    """Return each node of a graph without names: what is done, to which nodes, with what."""
    order: dict[Node, int] = {}
    forms = []
    for node in unit.graph.nodes:
        order[node] = len(order)
        arguments = fx.map_arg((node.args, node.kwargs), lambda other: f"%{order[other]}")
        target = _attribute(unit, node) if node.op == "get_attr" else str(node.target)
        forms.append(f"{node.op} {target} {arguments} {_value(node)} {node.meta.get('placement')}")
    return forms


def _attribute(unit: GraphModule, node: Node) -> str:
    owner, _, leaf = str(node.target).rpartition(".")
    value = getattr(unit.get_submodule(owner), leaf)
    held = (value.shape, value.dtype) if isinstance(value, Tensor) else type(value)
    shard = node.meta.get("shard")
    return f"{held} {shard and replace(shard, name='')}"


def _value(node: Node) -> str:
    value = node.meta.get("val")
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else str(value)
