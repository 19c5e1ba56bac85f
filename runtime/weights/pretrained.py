"""First weights of a run from a Hugging Face folder, without a whole copy on any rank.

Each rank reads the blocks of the tensors that its pieces of the states hold
(`checkpoints/boxes.py`), straight into them. Before anything is read, config and names are compared
with the plan's model: weights that do not fit, are missing or would be left over are refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from costmodels.hf_config import spec_from_hf_config
from costmodels.model import ModelSpec
from planner.files import read_json
from runtime.checkpoints.boxes import piece_boxes
from runtime.communication.mesh import Mesh
from runtime.models import build_model
from runtime.models.same import differences
from runtime.states.zero import ShardedStates
from runtime.weights.files import TensorFolder, open_tensors
from runtime.weights.names import Tile, may_be_left, tiles

CONFIG = "config.json"


def load_pretrained(
    folder: Path,
    model: ModelSpec,
    mesh: Mesh,
    states: ShardedStates,
    buffers: Mapping[str, Tensor],
) -> None:
    """Fill this rank's weights from a folder; all ranks take part.

    Args:
        folder: `config.json` beside safetensors, as `save_pretrained` leaves them.
        model: The plan's.
        mesh: Where this rank stands.
        states: What is filled, and then published to the ranks that compute with it.
        buffers: Filled too, where the folder has them.

    Raises:
        ValueError: The folder is not of this model, or damaged. Faults of names, shapes and kinds
            show on every rank alike.

    """
    check_config(folder, model)
    shapes = parameter_shapes(model)
    with open_tensors(folder) as tensors:
        check_tensors(tensors, model, shapes)
        for bucket in states.buckets:
            for segment in bucket.segments:
                name = segment.shard.name
                sources = spelled(tensors, tiles(model.architecture, name, shapes[name]))
                for box in piece_boxes(mesh, segment, segment.master):
                    read_block(tensors, sources, box.offsets, box.values)
        for name, buffer in buffers.items():
            for tile in tiles(model.architecture, name, tuple(buffer.shape)):
                if tile.name in tensors.names:
                    buffer.copy_(tensors.read(tile.name, [slice(None)] * buffer.dim()))
    states.publish()


def check_config(folder: Path, model: ModelSpec) -> None:
    """Refuse a folder whose config describes another model.

    Raises:
        ValueError: Names the first facts that differ, with both values.

    """
    path = folder / CONFIG
    config = read_json(path)
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not an object")  # noqa: TRY004  (a fault of a file)
    there = spec_from_hf_config(config, name=model.name, source=str(path))
    if differing := differences(there, model):
        raise ValueError(f"{path} is not the plan's model {model.name}: {differing}")


def parameter_shapes(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of a model, tied ones once.

    Raises:
        ValueError: The runtime has no module for the model.

    """
    module = build_model(model, seq_len=1)
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def check_tensors(
    tensors: TensorFolder, model: ModelSpec, shapes: dict[str, tuple[int, ...]]
) -> None:
    """Refuse files that lack a weight, have one of another shape or kind, or have too many.

    Raises:
        ValueError: Names the first such tensor.

    """
    used = set()
    for name, shape in shapes.items():
        for tile in spelled(tensors, tiles(model.architecture, name, shape)):
            if tensors.shape(tile.name) != tile.shape:
                raise ValueError(
                    f"{tile.name} in {tensors.folder} has shape {tensors.shape(tile.name)}, the "
                    f"plan's model needs {tile.shape}"
                )
            tensors.dtype(tile.name)
            used.add(tile.name)
    left = sorted(
        name
        for name in tensors.names - used
        if not may_be_left(name, num_layers=model.num_layers, is_tied=model.tied_embeddings)
        and not _is_buffer(name)
    )
    if left:
        raise ValueError(
            f"{tensors.folder} has {left[0]}, which the plan's model {model.name} does not use "
            f"({len(left)} such tensors): it is of another model"
        )


def _is_buffer(name: str) -> bool:
    return name.endswith("e_score_correction_bias")


def spelled(tensors: TensorFolder, wanted: Iterable[Tile]) -> tuple[Tile, ...]:
    """Return tiles under the names that a folder has for them.

    Raises:
        ValueError: It has none for one of them.

    """
    found = []
    for tile in wanted:
        without_head = tile.name.partition(".")[2]
        if tile.name in tensors.names:
            found.append(tile)
        elif without_head in tensors.names:
            found.append(replace(tile, name=without_head))
        else:
            raise ValueError(f"{tensors.folder} has no {tile.name}")
    return tuple(found)


def read_block(
    tensors: TensorFolder, sources: Sequence[Tile], offsets: Sequence[int], values: Tensor
) -> None:
    """Fill a block of a parameter.

    Args:
        tensors: Where to read.
        sources: What the parameter is made of.
        offsets: Where the block begins in the parameter.
        values: The block; filled in place, in its own dtype and on its own device.

    """
    with torch.no_grad():
        for tile in sources:
            cuts = [
                (max(at, begin), min(at + size, begin + reach))
                for at, size, begin, reach in zip(
                    offsets, values.shape, tile.offsets, tile.sizes, strict=True
                )
            ]
            if all(low < high for low, high in cuts):
                inside = [slice(a - t, b - t) for (a, b), t in zip(cuts, tile.offsets, strict=True)]
                place = tuple(slice(a - o, b - o) for (a, b), o in zip(cuts, offsets, strict=True))
                read = tensors.read(tile.name, inside if tile.is_whole else inside[1:])
                target = values[place]
                target.copy_(read.view(target.shape))
