"""The other side: training steps as one writes them with torch's own parallelism.

Five programs, each a constructor that spreads the model and a call that runs one step:

    Ddp            DistributedDataParallel                      copies of the model, other tokens
    FullyShard     fully_shard (FSDP2)                          ZeRO-3
    TensorParallel parallelize_module, loss_parallel            Megatron's cut of every layer
    Pipeline       torch.distributed.pipelining, Schedule1F1B   stages, and DDP within one if dp > 1

A step is forward, backward, clipping to a norm of 1, a fused AdamW and the loss over all ranks,
which a training loop would log. torch's `context_parallel` is not among them: on the CPU its
attention has no sharding strategy (torch 2.13).
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (torch's own idiom)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from runtime.models import rope
from runtime.models.llama import Llama

MAX_NORM = 1.0
RATE, BETAS, EPSILON, DECAY = 3e-4, (0.9, 0.95), 1e-8, 0.1


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """Return the optimizer; norm weights do not decay."""
    every = list(parameters)
    groups = [
        {"params": [p for p in every if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in every if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPSILON, fused=True)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of logits [B, S, V] and labels [B, S]."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def positions_of(ids: Tensor) -> Tensor:
    """Return positions [B, S] that count from 0."""
    return torch.arange(ids.shape[1]).expand(ids.shape[0], -1)


def average(loss: Tensor) -> Tensor:
    """Return the mean of all ranks' losses."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def learn(
    model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, labels: Tensor
) -> Tensor:
    """Run one step on this rank's tokens [B, S] and return this rank's loss."""
    loss = cross_entropy(model(ids, positions_of(ids)), labels)
    loss.backward()
    clip_grad_norm_(model.parameters(), MAX_NORM, foreach=True)
    optimizer.step()
    optimizer.zero_grad()
    return loss


class Ddp:
    """Every rank holds the model and sees its own tokens."""

    def __init__(self, model: Llama) -> None:
        self._model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self._optimizer = adamw(model.parameters())

    def step(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Run one step on this rank's tokens [B, S] and return the loss of all ranks."""
        return average(learn(self._model, self._optimizer, ids, labels))


class FullyShard:
    """Every rank holds a piece of each layer, which is whole only while it computes."""

    def __init__(self, model: Llama) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model.model.embed_tokens, mesh=mesh)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard([model.model.norm, model.lm_head], mesh=mesh)
        fully_shard(model, mesh=mesh)
        self._model = model
        self._optimizer = adamw(model.parameters())

    def step(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Run one step on this rank's tokens [B, S] and return the loss of all ranks."""
        return average(learn(self._model, self._optimizer, ids, labels))


class TensorParallel:
    """Every rank computes a share of each layer's heads and columns, on the same tokens."""

    def __init__(self, model: Llama, *, sequence_parallel: bool) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        plan = sequence_plan() if sequence_parallel else plain_plan()
        parallelize_module(model, mesh, plan)
        self._model = model
        self._optimizer = adamw(model.parameters())

    def step(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Run one step on tokens [B, S], the same on all ranks, and return the loss."""
        with loss_parallel():
            loss = cross_entropy(self._model(ids, positions_of(ids)), labels)
            loss.backward()
        self._clip()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach().full_tensor()

    def _clip(self) -> None:
        """Clip distributed tensors and plain ones (norms, if they are copies) by one norm."""
        cut, plain = (g["params"] for g in self._optimizer.param_groups)
        norms = [get_total_norm([p.grad for p in part]) for part in (cut, plain)]
        whole = [n.full_tensor() if hasattr(n, "full_tensor") else n for n in norms]
        total = torch.linalg.vector_norm(torch.stack(whole))
        for part in (cut, plain):
            clip_grads_with_norm_(part, MAX_NORM, total)


def plain_plan() -> dict[str, ParallelStyle]:
    """Return how modules are cut where activations between them are copies."""
    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        **_layers(Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }


def sequence_plan() -> dict[str, ParallelStyle]:
    """Return the same with activations between modules, and norms, cut over the sequence."""
    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        **_layers(Shard(1)),
        "model.layers.*.input_layernorm": SequenceParallel(),
        "model.layers.*.post_attention_layernorm": SequenceParallel(),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }


def _layers(between: Placement) -> dict[str, ParallelStyle]:
    """Cut attention by heads, the feed-forward by columns; their inputs are made whole once."""
    whole = Replicate()
    columns = (*(f"self_attn.{letter}_proj" for letter in "qkv"), "mlp.gate_proj", "mlp.up_proj")
    parts: dict[str, ParallelStyle] = {
        "self_attn": PrepareModuleInput(
            input_layouts=(between, None, None), desired_input_layouts=(whole, None, None)
        ),
        "mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(whole,)),
        **{name: ColwiseParallel() for name in columns},
        "self_attn.o_proj": RowwiseParallel(output_layouts=between),
        "mlp.down_proj": RowwiseParallel(output_layouts=between),
    }
    return {f"model.layers.*.{name}": style for name, style in parts.items()}


class Stage(nn.Module):
    """A run of the model's layers, with the embedding before or the head behind them."""

    def __init__(self, model: Llama, first: int, last: int) -> None:
        super().__init__()
        whole = model.model
        self.embedding = whole.embed_tokens if first == 0 else None
        self.layers = whole.layers[first:last]
        is_last = last == len(whole.layers)
        self.head = nn.Sequential(whole.norm, model.lm_head) if is_last else None
        self.register_buffer("frequencies", whole.frequencies, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Take tokens [B, S] or hidden states [B, S, H]; return hidden states or logits."""
        positions = torch.arange(x.shape[1]).expand(x.shape[0], -1)
        if self.embedding is not None:
            x = self.embedding(x)
        cos, sin = rope.tables(positions, self.frequencies, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x if self.head is None else self.head(x)


class Pipeline:
    """Stages on ranks, one forward and one backward in turn; copies of a stage see other tokens."""

    def __init__(self, model: Llama, *, num_stages: int, num_micro_batches: int) -> None:
        copies = dist.get_world_size() // num_stages
        mesh = init_device_mesh("cpu", (num_stages, copies), mesh_dim_names=("pp", "dp"))
        self._group = mesh.get_group("pp")
        index, size = mesh.get_local_rank("pp"), len(model.model.layers) // num_stages
        module: nn.Module = Stage(model, index * size, (index + 1) * size)
        if copies > 1:
            module = DistributedDataParallel(
                module, process_group=mesh.get_group("dp"), gradient_as_bucket_view=True
            )
        stage = PipelineStage(module, index, num_stages, torch.device("cpu"), group=self._group)
        self._schedule = Schedule1F1B(stage, num_micro_batches, loss_fn=cross_entropy)
        self._is_first, self._is_last = stage.is_first, stage.is_last
        self._num_stages = num_stages
        self._parameters = list(module.parameters())
        self._optimizer = adamw(self._parameters)

    def step(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Run one step on this copy's tokens [B, S] and return the loss of all ranks."""
        losses: list[Tensor] = []
        inputs = (ids,) if self._is_first else ()
        if self._is_last:
            self._schedule.step(*inputs, target=labels, losses=losses)
        else:
            self._schedule.step(*inputs)
        self._clip()
        self._optimizer.step()
        self._optimizer.zero_grad()
        loss = torch.stack(losses).mean() if losses else torch.zeros(())
        return average(loss) * self._num_stages  # only the last stage has one

    def _clip(self) -> None:
        """Clip by the norm of all stages."""
        square = get_total_norm([p.grad for p in self._parameters], foreach=True).square()
        dist.all_reduce(square, group=self._group)
        clip_grads_with_norm_(self._parameters, MAX_NORM, square.sqrt(), foreach=True)
