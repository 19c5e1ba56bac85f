"""A checkpoint as a folder that Hugging Face's `from_pretrained` reads.

    python -m runtime.weights.export run/checkpoints/step-00000200 -o model/ --dtype bf16

One process, one tensor in memory at a time, whatever the plan that wrote the checkpoint. Names
and splits are those of the model's family (`names.py`); the config is written from the model, or
taken with the tokenizer from the folder that the run began with (`--like`).
"""

import argparse
import json
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load

from costmodels.model import ModelSpec
from planner.files import write_text
from runtime.checkpoints.files import Manifest, ManifestReader, read_manifest
from runtime.checkpoints.saving import FAULTS, reason_of, record_of
from runtime.checkpoints.sharded_state import BUFFER, MODEL
from runtime.weights.config import hf_config
from runtime.weights.files import FILE_BYTES, TensorEntry, write_tensors
from runtime.weights.names import Tile, tiles
from runtime.weights.pretrained import CONFIG, check_config

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Beside weights and config, what makes a folder of use: words to tokens, ways to generate.
_COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.*",
    "merges.txt",
    "*generation*.json",
)


def export(
    checkpoint: Path,
    output: Path,
    *,
    dtype: torch.dtype,
    like: Path | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write a checkpoint's weights as a Hugging Face folder; it appears whole or not at all.

    Args:
        checkpoint: A folder of one checkpoint.
        output: A folder that is not there yet.
        dtype: Of the weights; routers' corrections keep their own.
        like: A folder of the same model whose config and tokenizer are taken.
        file_bytes: Largest file, unless one tensor is larger.

    Raises:
        ValueError: The checkpoint is damaged, the folders are of other models, or the output
            cannot be written.

    """
    manifest = read_manifest(checkpoint)
    model = record_of(checkpoint, manifest).model
    if output.exists():
        raise ValueError(f"{output} is there; name a new folder")
    if like is not None:
        check_config(like, model)
    unfinished = output.with_name(f".{output.name}.part")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        _write_config(unfinished, model, dtype, like)
        write_tensors(
            unfinished, list(_entries(checkpoint, manifest, model, dtype)), file_bytes=file_bytes
        )
        unfinished.rename(output)
    except OSError as error:
        raise ValueError(f"cannot write {output}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_config(folder: Path, model: ModelSpec, dtype: torch.dtype, like: Path | None) -> None:
    if like is None:
        config = hf_config(model, str(dtype).removeprefix("torch."))
        write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")
        return
    for pattern in (CONFIG, *_COMPANIONS):
        for path in like.glob(pattern):
            shutil.copyfile(path, folder / path.name)


def _entries(
    checkpoint: Path, manifest: Manifest, model: ModelSpec, dtype: torch.dtype
) -> Iterator[TensorEntry]:
    """Yield the files' tensors; those of one parameter follow each other and share one read."""
    for key, stored in manifest.tensors.items():
        kind, _, name = key.partition("/")
        if kind not in (MODEL, BUFFER):
            continue
        parameter = _Whole(checkpoint, manifest, key)
        own = getattr(torch, stored.dtype)
        for tile in tiles(model.architecture, name, stored.shape):
            yield TensorEntry(
                name=tile.name,
                shape=tile.shape,
                dtype=dtype if kind == MODEL else own,
                values=partial(parameter.tile, tile),
            )


class _Whole:
    """A tensor of a checkpoint, in memory from its first part to its last."""

    def __init__(self, checkpoint: Path, manifest: Manifest, key: str) -> None:
        self._checkpoint = checkpoint
        self._manifest = manifest
        self._key = key
        self._values: Tensor | None = None

    def tile(self, tile: Tile) -> Tensor:
        """Return one of the files' tensors."""
        values = self._read() if self._values is None else self._values
        reaches = [at + size for at, size in zip(tile.offsets, tile.sizes, strict=True)]
        is_last = reaches == list(values.shape)
        self._values = None if is_last else values
        place = tuple(slice(at, end) for at, end in zip(tile.offsets, reaches, strict=True))
        return values[place].reshape(tile.shape)

    def _read(self) -> Tensor:
        stored = self._manifest.tensors[self._key]
        values = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
        reader = ManifestReader(self._checkpoint, self._manifest)
        try:
            with warnings.catch_warnings(action="ignore"):  # that no other process takes part
                load({self._key: values}, storage_reader=reader, no_dist=True)
        except FAULTS as error:
            raise ValueError(f"cannot read {self._key}: {reason_of(error)}") from error
        return values


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m runtime.weights.export",
        description="Write a checkpoint's weights as a Hugging Face folder.",
        epilog="example: python -m runtime.weights.export run/checkpoints/step-00000200 -o model/",
    )
    parser.add_argument("checkpoint", type=Path, help="folder of one checkpoint")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to make")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16", help="(bf16)")
    parser.add_argument("--like", type=Path, help="take config and tokenizer from this folder")
    given = parser.parse_args(arguments)
    try:
        export(given.checkpoint, given.output, dtype=DTYPES[given.dtype], like=given.like)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201  (a command's message)
        return 2
    print(f"{given.output} written")  # noqa: T201  (a command's result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
