"""What a checkpoint holds: whole tensors under the model's own names, in blocks that any plan fits.

Each rank writes and reads the blocks of each tensor that it owns; torch.distributed.checkpoint
matches blocks of the file with blocks that are asked for, so the degrees may differ. Stored are

    model/NAME             weights in the optimizer's precision
    exp_avg/NAME ...       the optimizer's states of each parameter
    buffer/NAME            values that move without a gradient (the routers' corrections)

Samples, schedule and step counts follow from the number of steps (`checkpoints.RunRecord`), and
nothing in training draws random numbers besides: there is no generator whose state could be lost.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from planner.codec import Json
from runtime.checkpoints.boxes import Box, piece_boxes
from runtime.checkpoints.files import Manifest, ManifestReader, ManifestWriter
from runtime.communication.mesh import Group, Mesh
from runtime.program import Program
from runtime.states.buckets import Segment
from runtime.states.optimizer import ShardedOptimizer
from runtime.states.zero import ShardedStates

MODEL, BUFFER = "model", "buffer"
# Buffers that are weights in all but name; the others are constants of the model's making.
TRAINED_BUFFERS = ("e_score_correction_bias",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The blocks of one tensor that this rank has; speaks torch's protocol for sharded tensors.

    Attributes:
        shape: Of the whole tensor.
        boxes: All blocks, in any order. Two may be of the same place: a rank that holds the first
            and the last stage has a tied embedding twice.
        written: Those that are this rank's to write.

    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    written: tuple[Box, ...]

    def size(self) -> torch.Size:
        """Return the shape of the whole tensor."""
        return torch.Size(self.shape)

    def to_write(self, index: MetadataIndex) -> Tensor:
        """Return the values of the block that begins at an offset."""
        assert index.offset is not None
        return {box.offsets: box.values for box in self.written}[tuple(index.offset)]

    def to_fill(self, index: MetadataIndex) -> Tensor:
        """Return the values of the block at a place in `boxes`."""
        assert index.index is not None
        return self.boxes[index.index].values

    def copied(self) -> "Blocks":
        """Return what is written with values of its own, on the host."""
        copies = tuple(
            replace(box, values=torch.empty_like(box.values, device="cpu").copy_(box.values))
            for box in self.written
        )
        return replace(self, boxes=copies, written=copies)

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """Return what to write (torch's protocol)."""
        return [self._write_item(fqn, box) for box in self.written]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return what to read (torch's protocol)."""
        return [_chunk(box) for box in self.boxes]

    def _write_item(self, fqn: str, box: Box) -> WriteItem:
        return WriteItem(
            index=MetadataIndex(fqn, torch.Size(box.offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=_chunk(box),
                properties=TensorProperties.create_from_tensor(box.values),
                size=self.size(),
            ),
        )


State = Mapping[str, Blocks]


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:  # noqa: ANN401  (torch's signature)
        return self.state_dict[index.fqn].to_write(index)


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        # Torch's own replaces what is neither tensor nor number by None.
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found: Tensor = self.state_dict[index.fqn].to_fill(index)
        return found


def state_of(
    mesh: Mesh,
    states: ShardedStates,
    optimizer: ShardedOptimizer,
    buffers: Mapping[str, Tensor],
) -> dict[str, Blocks]:
    """Return this rank's blocks of every tensor of a run, by the names they are stored under.

    Args:
        mesh: Where the rank stands.
        states: Its weights.
        optimizer: Its optimizer, whose states must have been created.
        buffers: Values of the model that no optimizer moves, equal on all ranks that have them.

    """
    found: dict[str, list[Box]] = {}
    written: dict[str, list[Box]] = {}
    shapes = {}
    for bucket in states.buckets:
        for segment in bucket.segments:
            for kind, piece in _pieces(segment, optimizer):
                name = f"{kind}/{segment.shard.name}"
                boxes = list(piece_boxes(mesh, segment, piece))
                found.setdefault(name, []).extend(boxes)
                written.setdefault(name, []).extend(boxes if bucket.sharing.is_owner else ())
                shapes[name] = segment.shard.global_shape
    blocks = {
        name: Blocks(shape=shapes[name], boxes=tuple(held), written=tuple(written[name]))
        for name, held in found.items()
    }
    return blocks | {f"{BUFFER}/{name}": _whole(values) for name, values in buffers.items()}


def buffers_of(program: Program) -> dict[str, Tensor]:
    """Return a rank's buffers that belong to the run's state, by the model's names."""
    return {
        name: buffer
        for stage in program.stages
        for unit in stage.units
        for name, buffer in unit.named_buffers()
        if name.endswith(TRAINED_BUFFERS)
    }


def write_state(folder: Path, state: State, run: Json, group: Group) -> None:
    """Write a run's state into an empty folder; all ranks take part.

    Args:
        folder: Must be there.
        state: This rank's blocks.
        run: What the manifest says of the run.
        group: All ranks, over the host.

    Raises:
        Exception: Whatever failed on any rank, on all of them.

    """
    save(
        dict(state),
        storage_writer=ManifestWriter(folder, run),
        planner=_SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        process_group=group.handle,
    )


def read_state(folder: Path, manifest: Manifest, state: State, group: Group) -> None:
    """Fill this rank's blocks from a checkpoint; all ranks take part.

    Raises:
        Exception: Whatever failed on any rank, on all of them.

    """
    load(
        dict(state),
        storage_reader=ManifestReader(folder, manifest),
        planner=_LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        process_group=group.handle,
    )


def check_contents(folder: Path, manifest: Manifest, state: State) -> None:
    """Refuse a checkpoint that lacks a tensor of this rank, or has it in another shape.

    Raises:
        ValueError: Names the first such tensor.

    """
    for name, blocks in state.items():
        if name not in manifest.tensors:
            kinds = sorted({key.partition("/")[0] for key in manifest.tensors})
            raise ValueError(
                f"the checkpoint {folder} has no {name}: it holds {', '.join(kinds)}, of another "
                "model or optimizer"
            )
        shape = manifest.tensors[name].shape
        if shape != blocks.shape:
            raise ValueError(
                f"{name} has shape {shape} in the checkpoint {folder}, the plan's model has "
                f"{blocks.shape}"
            )


def _pieces(segment: Segment, optimizer: ShardedOptimizer) -> Iterable[tuple[str, Tensor]]:
    yield MODEL, segment.master
    for kind, value in optimizer.inner.state.get(segment.master, {}).items():
        if value.numel() == segment.master.numel() and kind != "step":
            yield kind, value


def _whole(values: Tensor) -> Blocks:
    shape = tuple(values.shape)
    box = Box(offsets=(0,) * len(shape), sizes=shape, values=values)
    return Blocks(shape=shape, boxes=(box,), written=(box,))


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
