"""A checkpoint's files: torch.distributed.checkpoint's own, under a manifest with checksums.

    manifest.json      what the run was, and every block: place in the tensor, file, bytes, CRC-32
    __RANK_N.distcp    blocks as torch writes them
    .metadata          torch's own index, for its tools; never read here: it is a pickle

Checksums are taken of what stands in the files after writing and compared when a block is read,
so that a flipped bit is an error and not a weight. The manifest is written last.

Format: CRC-32 of zlib (ISO 3309), over the bytes of one block.
"""

import io
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from planner.codec import DecodeError, Json, decode, encode
from planner.files import read_json, write_text

MANIFEST = "manifest.json"
SCHEMA = 1
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlock:
    """A block of a tensor in a file.

    Attributes:
        offsets: Where it begins in the tensor, per dim.
        sizes: How far it reaches.
        file: In the checkpoint's folder.
        start: Its first byte there.
        num_bytes: How many.
        crc32: Of these bytes.

    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    num_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of a checkpoint: its dtype (as in "float32"), shape and blocks."""

    dtype: str
    shape: tuple[int, ...]
    blocks: tuple[StoredBlock, ...]

    def __post_init__(self) -> None:
        """Refuse what could not be read, or would be read from elsewhere."""
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, not {self.dtype!r}")
        for block in self.blocks:
            if Path(block.file).name != block.file:
                raise ValueError(f"{block.file!r} is no file of the checkpoint's folder")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        run: What the run says of itself; see `checkpoints.RunRecord`.
        tensors: By name.

    """

    run: object
    tensors: Mapping[str, StoredTensor]


def read_manifest(folder: Path) -> Manifest:
    """Read what a checkpoint holds.

    Raises:
        ValueError: There is no checkpoint, or the manifest is damaged; the message names it.

    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"there is no checkpoint in {folder} (no {MANIFEST})")
    document = read_json(path)
    tensors = document.get("tensors") if isinstance(document, dict) else None
    if not isinstance(document, dict) or not isinstance(tensors, dict):
        raise ValueError(f"{path} is not the manifest of a checkpoint")  # noqa: TRY004  (a file's)
    if document.get("schema") != SCHEMA:
        raise ValueError(
            f"{path} has schema {document.get('schema')!r}; this version reads {SCHEMA}"
        )
    try:
        found = {name: decode(StoredTensor, entry, name) for name, entry in tensors.items()}
    except DecodeError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return Manifest(run=document.get("run"), tensors=found)


@dataclass(frozen=True, slots=True)
class _Checked:
    """torch's place of a block in a file, and the checksum of what stands there."""

    place: Any
    crc32: int


class ManifestWriter(FileSystemWriter):
    """Writes torch's files, then the manifest."""

    def __init__(self, folder: Path, run: Json) -> None:
        """Prepare to write into a folder that is there; files reach the disk before the index."""
        super().__init__(folder, sync_files=True)
        self._folder = folder
        self._run = run

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's blocks and take their checksums."""
        results = super().write_data(plan, planner).wait()
        future: Future[list[WriteResult]] = Future()
        future.set_result([self._checked(result) for result in results])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write torch's index and the manifest, on one rank."""
        checked = {result.index: result.storage_data for part in results for result in part}
        plain = [
            WriteResult(index=index, size_in_bytes=found.place.length, storage_data=found.place)
            for index, found in checked.items()
        ]
        super().finish(metadata, [plain])
        document = {
            "schema": SCHEMA,
            "run": self._run,
            "tensors": {
                name: encode(_stored(name, tensor, checked))
                for name, tensor in sorted(metadata.state_dict_metadata.items())
            },
        }
        write_text(self._folder / MANIFEST, json.dumps(document, sort_keys=True) + "\n")

    def _checked(self, result: WriteResult) -> WriteResult:
        place = result.storage_data
        content = _read_bytes(self._folder / place.relative_path, place.offset, place.length)
        return WriteResult(
            index=result.index,
            size_in_bytes=result.size_in_bytes,
            storage_data=_Checked(place, zlib.crc32(content)),
        )


class ManifestReader(FileSystemReader):
    """Reads what a manifest lists, and only what its checksums confirm."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Prepare to read from a folder."""
        super().__init__(folder)
        self._folder = folder
        self._manifest = manifest

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:  # noqa: ARG002  (torch's)
        """Return the manifest in torch's form."""
        blocks = {
            MetadataIndex(name, torch.Size(block.offsets)): block
            for name, tensor in self._manifest.tensors.items()
            for block in tensor.blocks
        }
        tensors = {name: _torch_form(tensor) for name, tensor in self._manifest.tensors.items()}
        return Metadata(state_dict_metadata=dict(tensors), storage_data=blocks)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the plan asks for; each stored block is read once."""
        places: list[tuple[StoredBlock, ReadItem]] = [
            (self.storage_data[item.storage_index], item) for item in plan.items
        ]
        places.sort(key=lambda pair: (pair[0].file, pair[0].start))
        for block, items in groupby(places, key=lambda pair: pair[0]):
            stored = self._read(block)
            for _, item in items:
                part = _part(stored, item)
                target = planner.resolve_tensor(item).detach()
                target.copy_(part)
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, block: StoredBlock) -> Tensor:
        path = self._folder / block.file
        content = _read_bytes(path, block.start, block.num_bytes)
        if len(content) != block.num_bytes or zlib.crc32(content) != block.crc32:
            raise ValueError(
                f"{path} is damaged: bytes from {block.start} on are not those written"
            )
        found: Tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        return found


def _part(stored: Tensor, item: ReadItem) -> Tensor:
    part = stored
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        part = part.narrow(dim, start, length)
    return part


def _read_bytes(path: Path, start: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(length)


def _torch_form(tensor: StoredTensor) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(offsets=torch.Size(block.offsets), sizes=torch.Size(block.sizes))
        for block in tensor.blocks
    ]
    properties = TensorProperties(dtype=_DTYPES[tensor.dtype])
    return TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)


def _stored(name: str, tensor: Any, checked: Mapping[Any, _Checked]) -> StoredTensor:  # noqa: ANN401
    def blocks() -> Iterator[StoredBlock]:
        for chunk in tensor.chunks:
            found = checked[MetadataIndex(name, chunk.offsets)]
            yield StoredBlock(
                offsets=tuple(chunk.offsets),
                sizes=tuple(chunk.sizes),
                file=found.place.relative_path,
                start=found.place.offset,
                num_bytes=found.place.length,
                crc32=found.crc32,
            )

    return StoredTensor(
        dtype=str(tensor.properties.dtype).removeprefix("torch."),
        shape=tuple(tensor.size),
        blocks=tuple(blocks()),
    )
