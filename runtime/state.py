"""Checkpoints that any plan can resume: whole tensors under the model's own names, in blocks.

Each rank writes and reads the blocks of each tensor that it owns; torch.distributed.checkpoint
matches blocks of the file with blocks that are asked for, so the degrees may differ. Stored are

    model/NAME             weights in the optimizer's precision
    exp_avg/NAME ...       the optimizer's states of each parameter
    progress               [optimizer steps that are done]

The schedule, the samples and nothing else follow from the number of steps, so that is all of it.
A checkpoint is written beside its place and renamed when it is whole: what has the name is whole.
"""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from runtime.boxes import Box, boxes
from runtime.buckets import Segment
from runtime.mesh import Mesh
from runtime.optimizer import ShardedOptimizer
from runtime.zero import ShardedStates

PROGRESS = "progress"


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The blocks of one tensor that this rank has; speaks torch's protocol for sharded tensors."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    writes: bool

    def size(self) -> torch.Size:
        """Return the shape of the whole tensor."""
        return torch.Size(self.shape)

    def at(self, index: MetadataIndex) -> Tensor:
        """Return the values of the block that begins at an offset."""
        assert index.offset is not None
        return {box.offsets: box.values for box in self.boxes}[tuple(index.offset)]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """Return what to write (torch's protocol)."""
        return [self._write_item(fqn, box) for box in self.boxes if self.writes]

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


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:  # noqa: ANN401  (torch's signature)
        value = self.state_dict[index.fqn]
        return value.at(index) if isinstance(value, Blocks) else value


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
        value = self.state_dict[index.fqn]
        found: Tensor = value.at(index) if isinstance(value, Blocks) else value
        return found


def save_checkpoint(
    folder: Path, mesh: Mesh, states: ShardedStates, optimizer: ShardedOptimizer, num_steps: int
) -> None:
    """Write the run's state after a number of steps; all ranks take part.

    Raises:
        ValueError: The folder cannot be written; an older checkpoint of that name stays.

    """
    unfinished = folder.with_name(f".{folder.name}.part")
    state = {**_blocks(mesh, states, optimizer), PROGRESS: torch.tensor([num_steps])}
    planner = _SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        if mesh.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        # Its first exchange makes the others wait for the folder.
        save(state, checkpoint_id=unfinished, planner=planner)
        if mesh.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.rename(folder)
    except (OSError, CheckpointException) as error:
        raise ValueError(f"cannot write the checkpoint {folder}: {_reason(error)}") from error


def load_checkpoint(
    folder: Path, mesh: Mesh, states: ShardedStates, optimizer: ShardedOptimizer
) -> int:
    """Read a run's state into this plan's pieces; all ranks take part.

    Returns:
        Optimizer steps that are done.

    Raises:
        ValueError: There is no such checkpoint, it is damaged, or it is of another model or
            optimizer.

    """
    optimizer.create_states()
    progress = torch.zeros(1, dtype=torch.int64)
    state: dict[str, Any] = {**_blocks(mesh, states, optimizer), PROGRESS: progress}
    planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        reader = FileSystemReader(folder)
        _check_contents(folder, reader.read_metadata().state_dict_metadata, state)
        load(state, storage_reader=reader, planner=planner)
    except ValueError:
        raise
    except Exception as error:  # torch raises many kinds for files that are not whole
        raise ValueError(f"cannot read the checkpoint {folder}: {_reason(error)}") from error
    num_steps = int(progress)
    optimizer.resume(num_steps)
    states.publish()
    return num_steps


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint of a run folder with the most steps, None without one."""
    found = sorted(folder.glob("step-*")) if folder.is_dir() else []
    return found[-1] if found else None


def checkpoint_folder(run_folder: Path, num_steps: int) -> Path:
    """Return where the checkpoint after a number of steps lies."""
    return run_folder / "checkpoints" / f"step-{num_steps:08d}"


def _check_contents(folder: Path, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, value in wanted.items():
        if name not in stored:
            kinds = sorted({key.partition("/")[0] for key in stored})
            raise ValueError(
                f"the checkpoint {folder} has no {name}: it holds {', '.join(kinds)}, of another "
                "model or optimizer"
            )
        meta = stored[name]
        size = tuple(meta.size) if isinstance(meta, TensorStorageMetadata) else None
        if size != tuple(value.size()):
            raise ValueError(
                f"{name} has shape {size} in the checkpoint {folder}, the plan's model has "
                f"{tuple(value.size())}"
            )


def _blocks(mesh: Mesh, states: ShardedStates, optimizer: ShardedOptimizer) -> dict[str, Blocks]:
    """Return this rank's blocks of every tensor, by the names they are stored under."""
    found: dict[str, list[Box]] = {}
    shards = {}
    writers = {}
    for bucket in states.buckets:
        for segment in bucket.segments:
            for kind, piece in _pieces(segment, optimizer):
                name = f"{kind}/{segment.shard.name}"
                found.setdefault(name, []).extend(_boxes_of(mesh, segment, piece))
                shards[name] = segment.shard
                writers[name] = bucket.sharing.is_owner
    return {
        name: Blocks(shape=shards[name].global_shape, boxes=tuple(held), writes=writers[name])
        for name, held in found.items()
    }


def _pieces(segment: Segment, optimizer: ShardedOptimizer) -> Iterable[tuple[str, Tensor]]:
    yield "model", segment.master
    for kind, value in optimizer.inner.state.get(segment.master, {}).items():
        if value.numel() == segment.master.numel() and kind != "step":
            yield kind, value


def _boxes_of(mesh: Mesh, segment: Segment, piece: Tensor) -> Iterable[Box]:
    axis = segment.shard.axis
    index, count = (0, 1) if axis is None else (mesh.coordinate(axis), mesh.size(axis))
    return boxes(segment.shard, index, count, segment.start, piece)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
