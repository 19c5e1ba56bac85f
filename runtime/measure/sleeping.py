"""Sleeping: a program whose computation is replaced by sleeps of the predicted length.

More ranks than cores share the cores, so times of real computation say little about a layout. Here
each unit sleeps for the seconds that the cost model gives its local work, while all else stays
real: executor and autograd, every collective and message with its true size, and what is done to
gradients (zeros, but as many). What such a run measures is what the model says of communication,
overlap, pipelines and recomputation.

    unit      embedding, layer or head: a nap among the collectives of its graph, in their order
    update    the optimizer's passes over its states: a nap; norm and publishing are real

A unit keeps the parameters and the boundaries of the one it replaces, so that states, ZeRO and
recomputation see no difference.
"""

import time
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.fx import GraphModule, Node

from runtime.communication import collectives
from runtime.communication.mesh import Mesh
from runtime.measure.sleep_seconds import Rests
from runtime.program import Program, UnitSpec
from runtime.states.zero import ShardedStates

# What a unit's activation passes through on its way from boundary to boundary.
EXCHANGES = (
    collectives.copy_to,
    collectives.reduce_from,
    collectives.all_gather,
    collectives.reduce_scatter,
)
SUMS = (collectives.reduce_from, collectives.reduce_scatter)


class Sleeper:
    """Sleeps on one rank; what one sleep takes too long, the next makes up for."""

    def __init__(self) -> None:
        """Owe nothing."""
        self._late = 0.0

    def sleep(self, seconds: float) -> None:
        """Sleep, on average for `seconds`."""
        wanted = seconds - self._late
        start = time.perf_counter()
        time.sleep(max(wanted, 0.0))
        self._late = time.perf_counter() - start - wanted


class Nap(nn.Module):
    """Stands for a unit's local work: sleeps on the way forward and on the way back."""

    def __init__(self, sleeper: Sleeper, forward: float, backward: float, again: float) -> None:
        """Sleep `forward` and `backward` seconds, and `again` when backward needs it once more."""
        super().__init__()
        self._sleeper = sleeper
        self._forward, self._backward, self._again = forward, backward, again

    def forward(self, x: Tensor, *parameters: Tensor) -> Tensor:
        """Return x; its gradient, and zeros for each parameter, come after the second sleep."""
        apply = cast("Any", _Nap.apply)
        in_backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001 (as checkpoint does)
        ahead = self._again if in_backward else self._forward
        slept: Tensor = apply(x, self._sleeper, ahead, self._backward, *parameters)
        return slept


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        sleeper: Sleeper,
        ahead: float,
        back: float,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.rest = sleeper, back, [(p.shape, p.dtype, p.device) for p in parameters]
        ctx.save_for_backward(x)  # as products do, so that recomputation has something to do
        sleeper.sleep(ahead)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        sleeper, back, parameters = ctx.rest
        assert len(ctx.saved_tensors) == 1  # asking for them runs the unit again if it must
        sleeper.sleep(back)
        zeros = (
            torch.zeros((), dtype=dtype, device=device).expand(shape)
            for shape, dtype, device in parameters
        )
        return gradient, None, None, None, *zeros


class SleepingUpdate:
    """The optimizer's step without its arithmetic."""

    def __init__(self, states: ShardedStates, seconds: float) -> None:
        """Take `seconds` beside what the states do for real."""
        self._states = states
        self._seconds = seconds
        self._sleeper = Sleeper()

    def step(self, step: int) -> Tensor:  # noqa: ARG002  (as ShardedOptimizer's)
        """Measure the gradients, sleep, publish the weights; return the norm."""
        norm = self._states.gradient_norm()
        self._sleeper.sleep(self._seconds)
        self._states.clear_gradients()
        self._states.publish()
        return norm


def put_to_sleep(program: Program, rests: Rests) -> None:
    """Put naps in place of a program's computation, before states take its parameters over.

    Args:
        program: Fresh from `lower`; its stages are changed.
        rests: Of this rank.

    """
    sleeper = Sleeper()
    for stage in program.stages:
        units, specs = [], []
        for unit, spec, seconds in zip(
            stage.units, stage.specs, rests.units[stage.index], strict=True
        ):
            assert isinstance(unit, GraphModule)
            unit.add_module("nap", Nap(sleeper, *seconds))
            asleep = _asleep(unit, spec, stage.boundary.hidden_size)
            inputs = tuple(str(n.target) for n in asleep.graph.nodes if n.op == "placeholder")
            units.append(asleep)
            specs.append(UnitSpec(name=spec.name, inputs=inputs, recompute=spec.recompute))
        stage.units, stage.specs = nn.ModuleList(units), tuple(specs)
        stage.shared, stage.shared_inputs, stage.shared_outputs = _nothing(), (), ()


def _nothing() -> GraphModule:
    graph = fx.Graph()
    graph.output(())
    return GraphModule(nn.Module(), graph)


def _asleep(unit: GraphModule, spec: UnitSpec, hidden_size: int) -> GraphModule:
    """Return a unit's graph with a nap for all that is not a collective."""
    graph = fx.Graph()
    mesh = graph.placeholder("mesh")
    weights = [
        graph.get_attr(str(node.target)) for node in unit.graph.nodes if _is_parameter(unit, node)
    ]
    if spec.name == "embedding":
        ids = graph.placeholder("input_ids")
        activation = graph.call_function(blank_activation, (ids, weights[0], hidden_size))
    else:
        activation = graph.placeholder("hidden")
    moves = [n for n in unit.graph.nodes if n.op == "call_function" and n.target in EXCHANGES]
    # The nap stands where the unit's last product does, before partial sums meet: recomputation
    # ends there, for what follows has nothing to save.
    sums = moves[-1:] if moves and moves[-1].target in SUMS else []
    for move in moves[: len(moves) - len(sums)]:
        activation = _moved(graph, move, activation, mesh)
    activation = graph.call_module("nap", (activation, *weights))
    for move in sums:
        activation = _moved(graph, move, activation, mesh)
    if spec.name == "head":
        activation = graph.call_function(blank_loss, (activation, mesh))
    graph.output(activation)
    return GraphModule(unit, graph)


def _moved(graph: fx.Graph, move: Node, activation: Node, mesh: Node) -> Node:
    _, _, *where = move.args  # (x, mesh, axis, dim)
    assert callable(move.target)
    return graph.call_function(move.target, (activation, mesh, *where))


def _is_parameter(unit: GraphModule, node: Node) -> bool:
    if node.op != "get_attr":
        return False
    parent, _, name = str(node.target).rpartition(".")
    return isinstance(getattr(unit.get_submodule(parent), name, None), nn.Parameter)


def blank_activation(ids: Tensor, weight: Tensor, hidden_size: int) -> Tensor:
    """Return zeros [b, s, H] where the embedding would have looked tokens up."""
    return weight.new_zeros((*ids.shape, hidden_size))


def blank_loss(x: Tensor, mesh: Mesh) -> Tensor:
    """Return a loss of zero that depends on x, after the exchanges of the sharded cross entropy.

    Each token's maximum, then its sum of exponentials and its label's logit.
    """
    group = mesh.group("tp")
    if group.size > 1:
        scores = torch.zeros((3, x.shape[0] * x.shape[1]), device=x.device)
        collectives.all_reduce(scores[0], group, "max")
        collectives.all_reduce(scores[1:], group)
    return x[0, 0, 0].float() * 0
