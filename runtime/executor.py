"""Executor: runs one rank's row of a schedule on its stages.

Each action string means one thing here (s a stage, m a micro-batch):

    sRECV_Fm, sRECV_Bm  post the receive; whoever needs the tensor waits for it
    sFm                 run the stage; the last one adds to the summed loss
    sSEND_Fm, sSEND_Bm  send the stage's output, or the gradient of its input
    sBm                 gradients of the stage's weights and input
    sIm, sWm            the two halves of sBm

Stages that follow each other on one rank hand tensors over without a transfer. The loss of a step
is the sum over its tokens divided by their global count, so gradients need no averaging.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.fx import GraphModule

from costmodels.layout import Offload
from costmodels.schedule.action import Action, ActionKind
from runtime.communication import collectives
from runtime.communication.mesh import Mesh
from runtime.communication.pending import Done, Pending
from runtime.program import IGNORED_LABEL, TOKEN_WEIGHT, Batch, Program
from runtime.split_backward import Half, Key, WeightGradients, split_linears
from runtime.states.host_memory import activations_on_host
from runtime.states.zero import ShardedStates
from runtime.tracing.events import ActionWatch

BACKWARDS = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)  # those that complete weights
# Sends under way, whose tensors stay: gloo does not say that one is done. Chosen: one each way.
MOST_SENT = 2
MOST_STAGES = 4096  # chosen: keeps message tags apart, far above any pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A micro-batch between forward and backward on one stage.

    Attributes:
        activation: Input of the stage, a leaf that receives the gradient; None for the first.
        output: Where backward starts. An edge rather than the tensor, whose memory is free as soon
            as it is sent.

    """

    activation: Tensor | None
    output: GradientEdge


class Executor:
    """Runs training steps of one rank."""

    def __init__(
        self,
        program: Program,
        mesh: Mesh,
        states: ShardedStates,
        *,
        trace: ActionWatch | None = None,
    ) -> None:
        """Bind a program to the states that its backward fills; a trace is told of each action."""
        self._program = program
        self._mesh = mesh
        self._states = states
        self._trace = trace
        weights = next(program.stages[0].parameters())
        self._loss_dtype = torch.promote_types(weights.dtype, torch.float32)
        self._last_backward = _last_backwards(program.actions)
        self._reading_weight = {s.index for s in program.stages if s.reads(TOKEN_WEIGHT)}
        self._put_off = WeightGradients()
        if any(action.kind is ActionKind.BACKWARD_INPUT for action in program.actions):
            for unit in (unit for stage in program.stages for unit in stage.units):
                assert isinstance(unit, GraphModule)
                split_linears(unit, self._put_off)
        self._do = {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.BACKWARD_INPUT: self._backward_input,
            ActionKind.BACKWARD_WEIGHT: self._backward_weight,
            ActionKind.SEND_FORWARD: self._send_forward,
            ActionKind.RECV_FORWARD: self._receive_forward,
            ActionKind.SEND_BACKWARD: self._send_backward,
            ActionKind.RECV_BACKWARD: self._receive_backward,
        }

    def run(self, micro_batches: Sequence[Batch]) -> Tensor:
        """Run forward and backward of one step; the states then hold the step's gradients.

        Args:
            micro_batches: This data-parallel rank's share: `input_ids`, `labels` and, where they
                do not count from 0, `position_ids`, each [micro_batch_size, seq_len / cp].

        Returns:
            The loss per token that counts, a scalar that is the same on every rank.

        """
        self._counting = self._start_count(micro_batches)
        self._token_weight: Tensor | None = None
        self._batches = micro_batches
        self._loss = torch.zeros((), dtype=self._loss_dtype, device=self._mesh.device)
        self._running: dict[Key, Running] = {}
        self._outputs: dict[Key, Tensor] = {}  # made here, until sent or handed over
        self._activations: dict[Key, Pending] = {}  # inputs on their way to (stage, micro-batch)
        self._gradients: dict[Key, Pending] = {}  # gradients of outputs, likewise
        self._sending: list[Pending] = []
        for action in self._program.actions:
            with nullcontext() if self._trace is None else self._trace.action(str(action)):
                self._do[action.kind]((action.stage, action.micro_batch))
        for sent in self._sending:
            sent.wait()
        self._states.finish_gradients()
        # Every tensor-parallel rank of the last stage holds the same sum.
        loss = collectives.all_reduce(self._loss, self._mesh.group("world"))
        return loss / self._mesh.size("tp") / self._num_tokens()

    def _start_count(self, batches: Sequence[Batch]) -> Pending:
        """Begin to count the step's tokens; who needs the count waits for it.

        On NCCL it may stand in line behind weights that travel (`ShardedStates.publish`), which
        the first forwards are not to wait for.
        """
        counts = [(batch["labels"] != IGNORED_LABEL).sum() for batch in batches]
        return collectives.start_all_reduce(torch.stack(counts).sum(), self._mesh.group("dp_cp"))

    def _num_tokens(self) -> Tensor:
        return self._counting.wait().clamp(min=1)

    def _weight_of_a_token(self) -> Tensor:
        if self._token_weight is None:  # the same for all micro-batches of a step
            self._token_weight = self._num_tokens().to(self._loss_dtype).reciprocal()
        return self._token_weight

    def _forward(self, key: Key) -> None:
        stage = self._program.stage(key[0])
        activation = None
        if not stage.is_first:
            activation = self._activations.pop(key).wait().requires_grad_()
        batch = self._batches[key[1]]
        if key[0] in self._reading_weight:
            batch = {**batch, TOKEN_WEIGHT: self._weight_of_a_token()}
        with self._saving_activations():
            output = stage(activation, batch)
        self._running[key] = Running(activation=activation, output=get_gradient_edge(output))
        following = (key[0] + 1, key[1])
        if stage.is_last:
            self._loss = self._loss + output.detach()
            self._gradients[key] = Done(self._weight_of_a_token().to(output.dtype))
        elif self._is_here(following[0]):
            self._activations[following] = Done(output.detach())
        else:
            self._outputs[key] = output.detach().contiguous()

    def _saving_activations(self) -> AbstractContextManager[object]:
        if Offload.ACTIVATIONS not in self._program.layout.offload:
            return nullcontext()
        return activations_on_host([bucket.full for bucket in self._states.buckets])

    def _backward(self, key: Key) -> None:
        self._states.begin_backward(key[0], is_final=self._is_last_backward(key))
        self._differentiate(key)
        self._states.end_backward(key[0])

    def _backward_input(self, key: Key) -> None:
        self._states.begin_backward(key[0], Half.INPUT)
        with self._put_off.deferring(key):
            self._differentiate(key)
        self._states.end_backward(key[0])

    def _backward_weight(self, key: Key) -> None:
        is_final = self._is_last_backward(key)
        self._states.begin_backward(key[0], Half.WEIGHT, is_final=is_final)
        self._put_off.compute(key)
        self._states.end_backward(key[0])

    def _is_last_backward(self, key: Key) -> bool:
        return self._last_backward[key[0]] == key[1]

    def _differentiate(self, key: Key) -> None:
        """Run autograd through a stage and pass the gradient of its input on."""
        running = self._running.pop(key)
        gradient = self._gradients.pop(key).wait()
        torch.autograd.backward([running.output], [gradient])
        if running.activation is None:
            return
        upstream, previous = running.activation.grad, (key[0] - 1, key[1])
        assert upstream is not None
        if self._is_here(previous[0]):
            self._gradients[previous] = Done(upstream)
        else:
            self._outputs[key] = upstream.contiguous()

    def _send_forward(self, key: Key) -> None:
        self._send(key, *crossing(ActionKind.SEND_FORWARD, key))

    def _send_backward(self, key: Key) -> None:
        self._send(key, *crossing(ActionKind.SEND_BACKWARD, key))

    def _receive_forward(self, key: Key) -> None:
        crosses = crossing(ActionKind.RECV_FORWARD, key)
        self._activations[key] = self._receive(key, *crosses)

    def _receive_backward(self, key: Key) -> None:
        crosses = crossing(ActionKind.RECV_BACKWARD, key)
        self._gradients[key] = self._receive(key, *crosses)

    def _send(self, key: Key, stage: int, tag: int) -> None:
        self._sending = [sent for sent in self._sending if not sent.is_done()]
        while len(self._sending) >= MOST_SENT:
            self._sending.pop(0).wait()
        tensor = self._outputs.pop(key)
        group = self._mesh.group("pp")
        to = self._program.layout.rank_of_stage(stage)
        self._sending.append(collectives.start_send(tensor, group, to, tag))

    def _receive(self, key: Key, stage: int, tag: int) -> Pending:
        ids = self._batches[key[1]]["input_ids"]
        seq_len = ids.shape[1] * self._mesh.size("cp")
        here = self._program.stage(key[0])
        weight = next(here.parameters())
        shape = here.boundary_shape(ids.shape[0], seq_len)
        buffer = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        sender = self._program.layout.rank_of_stage(stage)
        return collectives.start_receive(buffer, self._mesh.group("pp"), sender, tag)

    def _is_here(self, stage: int) -> bool:
        return self._program.layout.rank_of_stage(stage) == self._mesh.coordinate("pp")


def crossing(kind: ActionKind, key: Key) -> tuple[int, int]:
    """Return the stage at the other end of a send or receive, and the message's tag.

    The tag names the message that crosses the boundary after a stage; tags differ within a step.
    Gloo matches messages by tag, so that receives may be posted in another order than sends.
    """
    stage, micro_batch = key
    is_backward = kind in (ActionKind.SEND_BACKWARD, ActionKind.RECV_BACKWARD)
    to_next = kind in (ActionKind.SEND_FORWARD, ActionKind.RECV_BACKWARD)
    boundary = stage if to_next else stage - 1
    tag = 1 + 2 * (micro_batch * MOST_STAGES + boundary) + int(is_backward)
    return stage + (1 if to_next else -1), tag


def _last_backwards(actions: Sequence[Action]) -> dict[int, int]:
    """Return the micro-batch of each stage's last backward."""
    return {a.stage: a.micro_batch for a in actions if a.kind in BACKWARDS}
