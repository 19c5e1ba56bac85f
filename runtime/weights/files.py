"""A folder of safetensors: one file, or several under an index, read in slices, written in turn.

    model.safetensors                                       or
    model.safetensors.index.json   {"weight_map": {NAME: FILE}}
    model-00001-of-00003.safetensors ...

A slice reads its own bytes and no more; writing holds one tensor at a time. A file is an 8-byte
little-endian length, a JSON header (name: dtype, shape, offsets), and the values.

Source: the safetensors format, https://github.com/huggingface/safetensors.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from planner.files import read_json, write_text

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FILE_BYTES = 5 * 10**9  # of one file; what `save_pretrained` has used for years
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


class TensorFolder:
    """The tensors of a folder of safetensors; files stay open and are mapped, not read."""

    def __init__(self, folder: Path, opened: Mapping[str, Any], files: Mapping[str, str]) -> None:
        """Take over opened files and the map from tensors to files; see `open_tensors`."""
        self.folder = folder
        self._opened = opened
        self._files = files

    @property
    def names(self) -> frozenset[str]:
        """All tensors' names."""
        return frozenset(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's dtype.

        Raises:
            ValueError: It is of a kind that no weights are computed in.

        """
        code = self._slice(name).get_dtype()
        if code not in DTYPES:
            raise ValueError(
                f"{name} in {self.folder} is {code}; weights are read from "
                f"{', '.join(sorted(DTYPES))}: convert the model first"
            )
        return DTYPES[code]

    def read(self, name: str, block: Sequence[slice]) -> Tensor:
        """Return a block of a tensor, in its own dtype.

        Raises:
            ValueError: The file is damaged.

        """
        try:
            values: Tensor = self._slice(name)[tuple(block)]
        except (SafetensorError, OSError) as error:
            raise ValueError(f"cannot read {name} in {self.folder}: {error}") from error
        return values

    def _slice(self, name: str) -> Any:  # noqa: ANN401  (the package has no type for it)
        return self._opened[self._files[name]].get_slice(name)


@contextmanager
def open_tensors(folder: Path) -> Iterator[TensorFolder]:
    """Open a folder of safetensors.

    Raises:
        ValueError: There are none, the index names what is not there, or a file is damaged.

    """
    index = folder / INDEX
    with ExitStack() as stack:
        if index.is_file():
            files = _weight_map(index)
            opened = {file: _open(stack, folder / file) for file in sorted(set(files.values()))}
            for name, file in files.items():
                if name not in opened[file].keys():  # noqa: SIM118  (a method, not a mapping)
                    raise ValueError(f"{index} says that {name} is in {file}, where it is not")
        elif (folder / SINGLE).is_file():
            opened = {SINGLE: _open(stack, folder / SINGLE)}
            files = dict.fromkeys(opened[SINGLE].keys(), SINGLE)
        else:
            raise ValueError(_nothing_in(folder))
        yield TensorFolder(folder, opened, files)


def _nothing_in(folder: Path) -> str:
    if not folder.is_dir():
        return f"no such folder: {folder}"
    pickled = any(folder.glob("*.bin"))
    hint = "; pickled .bin files are not read: convert them first" if pickled else ""
    return f"{folder} has neither {SINGLE} nor {INDEX}{hint}"


def _weight_map(index: Path) -> dict[str, str]:
    document = read_json(index)
    found = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{index} has no weight_map")
    for name, file in found.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{index}: {name} is in {file!r}, which is no file of that folder")
    return found


def _open(stack: ExitStack, path: Path) -> Any:  # noqa: ANN401  (the package has no type for it)
    try:
        return stack.enter_context(safe_open(path, framework="pt", device="cpu"))
    except (SafetensorError, OSError) as error:
        reason = "it is not there" if not path.exists() else str(error)
        raise ValueError(f"cannot read {path}: {reason}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor to be written.

    Attributes:
        values: Called when its turn comes; the tensor may be of another dtype.

    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return prod(self.shape) * self.dtype.itemsize


def write_tensors(
    folder: Path, entries: Sequence[TensorEntry], *, file_bytes: int = FILE_BYTES
) -> None:
    """Write tensors into files of at most a size (a larger tensor has one of its own).

    Raises:
        OSError: The disk does not take them.

    """
    groups = _grouped(entries, file_bytes)
    if len(groups) == 1:
        _write_file(folder / SINGLE, groups[0])
        return
    weight_map = {}
    for number, group in enumerate(groups, start=1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        _write_file(folder / file, group)
        weight_map.update({entry.name: file for entry in group})
    total = sum(entry.num_bytes for entry in entries)
    document = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_text(folder / INDEX, json.dumps(document, indent=1, sort_keys=True) + "\n")


def _grouped(entries: Sequence[TensorEntry], file_bytes: int) -> list[list[TensorEntry]]:
    groups: list[list[TensorEntry]] = [[]]
    used = 0
    for entry in entries:
        if groups[-1] and used + entry.num_bytes > file_bytes:
            groups.append([])
            used = 0
        groups[-1].append(entry)
        used += entry.num_bytes
    return groups


def _write_file(path: Path, entries: Sequence[TensorEntry]) -> None:
    ends = [0]
    for entry in entries:
        ends.append(ends[-1] + entry.num_bytes)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for entry, offsets in zip(entries, pairwise(ends), strict=True):
        header[entry.name] = {
            "dtype": _CODES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": offsets,
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # values are aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            values = entry.values().to(entry.dtype).contiguous()
            assert tuple(values.shape) == entry.shape, entry.name
            file.write(values.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
