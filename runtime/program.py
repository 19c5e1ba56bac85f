"""Program: what one rank runs, and where its pieces of the parameters lie.

`lower` makes it from a plan; the executor runs it; the dry run measures it. Between them stand
three types:

    ParameterShard   this rank's piece of one parameter, under the model's own name
    StageModule      one pipeline stage: a chain of fx graph modules, one per layer
    Program          the stages of one rank, their actions, the rank's coordinates

A unit (embedding, layer, head) is a `GraphModule` whose first argument is the mesh: collectives in
its graph are `call_function(collectives.all_gather, (x, mesh, "tp", dim))`, so no process group
hides in module state. The values that carry no weights (rotary tables, masks, sizes) are computed
once per micro-batch by `StageModule.shared` and handed to every unit; only the activation crosses
from unit to unit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from costmodels.layout import Layout
from costmodels.schedule.action import Action
from runtime.communication.mesh import Mesh

Batch: TypeAlias = Mapping[str, Tensor]

BATCH_FIELDS = ("input_ids", "position_ids", "labels")
TOKEN_WEIGHT = "token_weight"  # noqa: S105  (a field of a batch: the factor on a token's loss)
IGNORED_LABEL = -100  # the label that carries no loss, as in torch and Hugging Face


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterShard:
    """Where a rank's piece of a parameter lies in the whole.

    Attributes:
        name: The parameter's name in the model (Hugging Face's for the families we know).
        global_shape: Shape of the whole parameter, without padding.
        dim: The dim that is cut, None for a copy on every rank.
        axis: The mesh axis that cuts it, None for a copy.
        num_segments: Equal parts along `dim` that are cut one by one, so that a fused
            projection of queries, keys and values keeps a share of each (GPT-2: 3).
        block_axis: The mesh axis that cuts dim 0 besides, into equal blocks: experts over "ep".
        padded_size: Size of `dim` after padding to a multiple of the axis, 0 where nothing is cut.
            Padding rows are zero and have no gradient.
        gradient_sum_axes: Axes over which the gradients of equal copies must be added, besides
            the data axes: a norm that acts on a piece of the sequence sees a piece of its gradient.
        tied_stages: Stages that hold a copy of the same parameter; empty if only one does. Their
            gradients are added.

    """

    name: str
    global_shape: tuple[int, ...]
    dim: int | None = None
    axis: str | None = None
    num_segments: int = 1
    block_axis: str | None = None
    padded_size: int = 0
    gradient_sum_axes: tuple[str, ...] = ()
    tied_stages: tuple[int, ...] = ()

    def local_shape(self, count: int, num_blocks: int = 1) -> tuple[int, ...]:
        """Return the shape of one of `count` pieces of one of `num_blocks` blocks."""
        if self.dim is None:
            return self.global_shape
        shape = [*self.global_shape]
        shape[self.dim] = self.padded_size // count
        shape[0] //= num_blocks
        return tuple(shape)

    def of_rank(self, full: Tensor, mesh: Mesh) -> Tensor:
        """Return a rank's piece of a whole parameter, contiguous."""
        if self.block_axis is not None and tuple(full.shape) == self.global_shape:
            size = self.global_shape[0] // mesh.size(self.block_axis)
            block = full.narrow(0, mesh.coordinate(self.block_axis) * size, size)
            shard = replace(self, global_shape=tuple(block.shape), block_axis=None)
            return shard.of_rank(block, mesh)
        if self.axis is None:
            return self.cut(full, 0, 1)
        return self.cut(full, mesh.coordinate(self.axis), mesh.size(self.axis))

    def cut(self, full: Tensor, index: int, count: int) -> Tensor:
        """Return piece `index` of `count` of a whole parameter (or block), contiguous.

        Raises:
            ValueError: The tensor has another shape than the parameter.

        """
        if tuple(full.shape) != self.global_shape:
            raise ValueError(
                f"{self.name} has shape {tuple(full.shape)}, the model expects {self.global_shape}"
            )
        if self.dim is None:
            return full.contiguous()
        padding = self.padded_size - full.shape[self.dim]
        if padding:
            zeros = full.new_zeros((*full.shape[: self.dim], padding, *full.shape[self.dim + 1 :]))
            full = torch.cat((full, zeros), self.dim)
        segments = full.chunk(self.num_segments, self.dim)
        return torch.cat([part.chunk(count, self.dim)[index] for part in segments], self.dim)

    def places(self, mesh: Mesh) -> tuple[Tensor, ...]:
        """Return, for each dim, which entries of the whole a rank holds; -1 is padding.

        The piece is `full[places[0]][:, places[1]]...`, with zeros for padding.
        """
        places = [torch.arange(size) for size in self.global_shape]
        if self.block_axis is not None:
            size = self.global_shape[0] // mesh.size(self.block_axis)
            places[0] = places[0].narrow(0, mesh.coordinate(self.block_axis) * size, size)
        if self.dim is None:
            return tuple(places)
        index, count = 0, 1
        if self.axis is not None:
            index, count = mesh.coordinate(self.axis), mesh.size(self.axis)
        own = places[self.dim]
        # Blocks of dim 0 are never padded: experts divide, and what is cut within is another dim.
        padding = max(self.padded_size - self.global_shape[self.dim], 0)
        own = torch.cat((own, own.new_full((padding,), -1)))
        segments = own.chunk(self.num_segments)
        places[self.dim] = torch.cat([part.chunk(count)[index] for part in segments])
        return tuple(places)

    def join(self, pieces: list[Tensor]) -> Tensor:
        """Return the whole parameter from all its pieces: the inverse of `cut`."""
        if self.dim is None:
            return pieces[0]
        parts = [piece.chunk(self.num_segments, self.dim) for piece in pieces]
        ordered = [part[segment] for segment in range(self.num_segments) for part in parts]
        return torch.cat(ordered, self.dim).narrow(self.dim, 0, self.global_shape[self.dim])


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec:
    """How a unit of a stage is called.

    Attributes:
        name: "embedding", "layer_3", "head" ...
        inputs: Names of its arguments: "mesh", "hidden", batch fields, shared values.
        recompute: Its activations are computed again for the backward pass.

    """

    name: str
    inputs: tuple[str, ...]
    recompute: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """The activation between units: [micro_batch, sequence / (cp * sequence_shards), hidden]."""

    hidden_size: int
    context_parallel: int
    sequence_shards: int


class StageModule(nn.Module):
    """One pipeline stage: a chain of units, and the values they share.

    Attributes:
        index: Global stage index.
        is_first: It reads the batch's tokens and takes no activation.
        is_last: It returns the loss, summed over its tokens, as an fp32 (or wider) scalar.
        units: One `GraphModule` per embedding, layer and head, in order. A unit's parameters
            carry the model's own names; `units.2.model.layers.0.input_layernorm.weight` is the
            parameter `model.layers.0.input_layernorm.weight`.
        parameter_shards: One for each parameter of the stage, by name.

    """

    def __init__(
        self,
        *,
        index: int,
        num_stages: int,
        mesh: Mesh,
        shared: GraphModule,
        shared_inputs: tuple[str, ...],
        shared_outputs: tuple[str, ...],
        units: tuple[GraphModule, ...],
        specs: tuple[UnitSpec, ...],
        parameter_shards: tuple[ParameterShard, ...],
        boundary: Boundary,
    ) -> None:
        super().__init__()
        self.index = index
        self.is_first = index == 0
        self.is_last = index == num_stages - 1
        self.mesh = mesh
        self.shared = shared
        self.shared_inputs = shared_inputs
        self.shared_outputs = shared_outputs
        self.units = nn.ModuleList(units)
        self.specs = specs
        self.parameter_shards = parameter_shards
        self.boundary = boundary

    def forward(self, activation: Tensor | None, batch: Batch) -> Tensor:
        """Run the stage on one micro-batch.

        Args:
            activation: [b, s / (cp * sequence_shards), H] from the stage before, None for the
                first stage.
            batch: `input_ids` and `labels` [b, s / cp]; labels are the *next* tokens, already
                shifted, -100 where no loss is due. `position_ids` [b, s / cp] where they do not
                simply count from 0. `token_weight` where losses inside of the model are
                attached to activations; 1 if it is not there.

        Returns:
            The activation for the next stage (contiguous), or the loss summed over all tokens
            of this micro-batch that are not ignored. The caller divides by their global count.

        """
        values = {
            TOKEN_WEIGHT: 1.0,
            **with_positions(batch),
            "mesh": self.mesh,
            "hidden": activation,
        }
        shared = self.shared(*(values[name] for name in self.shared_inputs))
        values.update(zip(self.shared_outputs, shared, strict=True))
        for unit, spec in zip(self.units, self.specs, strict=True):
            arguments = [values[name] for name in spec.inputs]
            # Nothing in a unit draws random numbers, so there is no generator state to keep.
            values["hidden"] = (
                checkpoint(unit, *arguments, use_reentrant=False, preserve_rng_state=False)
                if spec.recompute and torch.is_grad_enabled()
                else unit(*arguments)
            )
        output = values["hidden"]
        assert isinstance(output, Tensor)
        return output

    def reads(self, field: str) -> bool:
        """Tell whether a unit, or what units share, reads a field of the batch."""
        return field in self.shared_inputs or any(field in spec.inputs for spec in self.specs)

    def boundary_shape(self, micro_batch_size: int, seq_len: int) -> tuple[int, int, int]:
        """Return the shape of the activation between stages for whole sequences of `seq_len`."""
        shards = self.boundary.context_parallel * self.boundary.sequence_shards
        return (micro_batch_size, seq_len // shards, self.boundary.hidden_size)

    def shard(self, name: str) -> ParameterShard:
        """Return where the parameter of a name lies; KeyError if the stage has none."""
        return {shard.name: shard for shard in self.parameter_shards}[name]


def with_positions(batch: Batch) -> dict[str, object]:
    """Return the batch with `position_ids` that count from 0 where it has none."""
    if "position_ids" in batch:
        return dict(batch)
    ids = batch["input_ids"]
    positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape[0], -1)
    return {**batch, "position_ids": positions}


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What one rank runs in a training step.

    Attributes:
        stages: The rank's stages in model order.
        actions: The rank's row of the schedule, with sends and receives.
        warnings: What the lowering could not do as the plan asks, in words (a parameter that no
            axis cuts, for instance); empty when all is as planned.

    """

    layout: Layout
    stages: tuple[StageModule, ...]
    actions: tuple[Action, ...] = ()
    warnings: tuple[str, ...] = field(default=())

    def stage(self, index: int) -> StageModule:
        """Return the stage of a global index; KeyError if this rank does not hold it."""
        return {stage.index: stage for stage in self.stages}[index]
