"""The state of `shard_tensors`: placements, local parameters, and the collectives made so far."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, fx, nn
from torch.fx import GraphModule, Node

from runtime.communication import collectives
from runtime.passes.pipeline import LoweringContext
from runtime.passes.placements import Partial, Placement, Replicated, Sharded
from runtime.passes.roles import Part, Role
from runtime.program import ParameterShard

AXIS = "tp"
SEQUENCE_DIM = 1


class Sharder:
    """The walk's state: what each value's placement is and which collectives exist."""

    def __init__(
        self, graph: GraphModule, context: LoweringContext, roles: dict[str, Role]
    ) -> None:
        self.module = graph
        self.graph: fx.Graph = graph.graph
        self.size = context.layout.tensor_parallel
        self.roles = roles if self.size > 1 else {}
        self.sequence_parallel = context.layout.sequence_parallel and self.size > 1
        self.placements: dict[Node, Placement] = {}
        self.warnings: list[str] = []
        self._made: dict[tuple[Node, Callable[..., Tensor], tuple[int, ...]], Node] = {}
        self._partial_gradients: set[Node] = set()
        self._full_gradients: set[Node] = set()
        self._trained = _depends_on_parameters(graph)
        first = next(iter(self.graph.nodes))
        with self.graph.inserting_before(first):
            self.mesh = self.graph.placeholder("mesh")
        self.mesh.meta = {"val": None, "module": ""}

    def placement(self, node: Node) -> Placement:
        """Return how a value lies."""
        return self.placements.get(node, Replicated())

    @property
    def stream(self) -> Placement:
        """How the residual stream lies between parallel regions."""
        return Sharded(SEQUENCE_DIM) if self.sequence_parallel else Replicated()

    def local_size(self, size: int, what: str) -> int:
        """Return a rank's share of a size.

        Raises:
            ValueError: It does not divide.

        """
        if size % self.size:
            raise ValueError(f"{what} of {size} does not divide over tensor_parallel {self.size}")
        return size // self.size

    # Parameters.

    def cut_parameter(self, node: Node) -> Placement:
        """Make a parameter local according to its role and return how it lies."""
        name = str(node.target)
        owner, _, leaf = name.rpartition(".")
        parameter = getattr(self.module.get_submodule(owner), leaf)
        if not isinstance(parameter, nn.Parameter):
            return Replicated()
        role = self.roles.get(name, Role(part=Part.REPLICATED))
        shard, placement = self._shard(name, tuple(parameter.shape), role, node)
        local = torch.empty(shard.local_shape(self.size), dtype=parameter.dtype, device="meta")
        local = nn.Parameter(local, requires_grad=parameter.requires_grad)
        setattr(self.module.get_submodule(owner), leaf, local)
        node.meta["shard"], node.meta["local"] = shard, local
        return placement

    def _shard(
        self, name: str, shape: tuple[int, ...], role: Role, node: Node
    ) -> tuple[ParameterShard, Placement]:
        if role.part is Part.REPLICATED:
            return ParameterShard(name=name, global_shape=shape), Replicated()
        turned = any(user.target is torch.ops.aten.t.default for user in node.users)
        dim = int(turned) if role.part is not Part.ROW else int(not turned)
        dim = min(dim, len(shape) - 1)
        padded = shape[dim]
        if role.part is Part.VOCABULARY:
            padded += -padded % self.size
        self.local_size(padded // role.num_segments, f"{name}: dim {dim}")
        shard = ParameterShard(
            name=name,
            global_shape=shape,
            dim=dim,
            axis=AXIS,
            num_segments=role.num_segments,
            padded_size=padded,
        )
        return shard, Sharded(dim, role.num_segments)

    def note_gradient(self, node: Node, *, is_partial: bool) -> None:
        """Remember whether a use gives a replicated parameter all of its gradient or a part."""
        if node.op == "get_attr" and "shard" in node.meta:
            (self._partial_gradients if is_partial else self._full_gradients).add(node)

    def finish(self) -> None:
        """Write placements and gradient sums onto the nodes."""
        for node in self._partial_gradients:
            assert node not in self._full_gradients, f"{node.target} is used whole and in parts"
            node.meta["shard"] = replace(node.meta["shard"], gradient_sum_axes=(AXIS,))
        for node in self.graph.nodes:
            node.meta["placement"] = self.placement(node)
        self.module.meta["warnings"] = tuple(self.warnings)

    # Communication.

    def to_replicated(self, node: Node, before: Node, *, uses_differ: bool) -> Node:
        """Return a value whole on every rank.

        Args:
            node: The value.
            before: The operation that needs it.
            uses_differ: Ranks do different work with it, so that its gradients must be added;
                otherwise every rank does the same.

        """
        match self.placement(node):
            case Replicated():
                if not uses_differ or not self.is_trained(node):
                    return node
                return self._call(collectives.copy_to, node, (), before, Replicated())
            case Partial():
                return self._call(collectives.reduce_from, node, (), before, Replicated())
            case Sharded(dim, num_segments):
                assert num_segments == 1, f"{node.name} is gathered while cut in segments"
                gather = collectives.all_gather if uses_differ else collectives.gather_replicated
                return self._call(gather, node, (dim,), before, Replicated())

    def to_sharded(self, node: Node, dim: int, before: Node) -> Node:
        """Return a value cut along a dim."""
        match self.placement(node):
            case Sharded(current, 1) if current == dim:
                return node
            case Partial():
                return self._call(collectives.reduce_scatter, node, (dim,), before, Sharded(dim))
            case Replicated():
                return self._call(collectives.split, node, (dim,), before, Sharded(dim))
        whole = self.to_replicated(node, before, uses_differ=False)
        return self.to_sharded(whole, dim, before)

    def to_stream(self, node: Node, before: Node) -> Node:
        """Return a partial value summed, and cut like the residual stream."""
        if self.sequence_parallel and node.meta["val"].dim() > SEQUENCE_DIM + 1:
            return self.to_sharded(node, SEQUENCE_DIM, before)
        return self.to_replicated(node, before, uses_differ=False)

    def is_trained(self, node: Node) -> bool:
        """Tell whether gradients flow into a value."""
        return node in self._trained

    def call(
        self, function: Callable[..., Tensor], args: tuple[object, ...], like: Node, at: Placement
    ) -> Node:
        """Insert a call before `like`, with its meta and a placement."""
        with self.graph.inserting_before(like):
            node = self.graph.call_function(function, args)  # type: ignore[arg-type]
        node.meta = {"val": like.meta["val"], "module": like.meta["module"]}
        self.placements[node] = at
        if any(self.is_trained(source) for source in node.all_input_nodes):
            self._trained.add(node)
        return node

    def _call(
        self,
        function: Callable[..., Tensor],
        source: Node,
        dims: tuple[int, ...],
        before: Node,
        at: Placement,
    ) -> Node:
        key = (source, function, dims)
        if key not in self._made:
            made = self.call(function, (source, self.mesh, AXIS, *dims), before, at)
            made.meta["val"] = source.meta["val"]
            self._made[key] = made
        return self._made[key]


def _depends_on_parameters(graph: GraphModule) -> set[Node]:
    parameters = {name for name, _ in graph.named_parameters()}
    found: set[Node] = set()
    for node in graph.graph.nodes:
        if node.target in parameters or any(i in found for i in node.all_input_nodes):
            found.add(node)
    return found
