"""Training data: real text or tokens as one long stream, and the same samples for every layout.

A sample is a window of seq_len + 1 tokens at a place drawn from (seed, step, index of the sequence
in the global batch). It depends on nothing else, so a run with other degrees, or one that resumes,
reads the same sequences in the same step. Documents follow each other, joined by a separator.

    text (folders, files)   bytes are tokens (0 separates documents), or a `tokenizers` file's ids
    .bin                    flat uint16 or, for vocabularies above 65,536, uint32 (nanoGPT's form)
    .npy                    one array of integers
    nothing                 the Python standard library's own sources, found on this machine
"""

import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Tokens = NDArray[np.integer]

SEPARATOR = b"\x00"  # no text holds it
LARGEST_UINT16 = np.iinfo(np.uint16).max
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".json", ".jsonl", ".csv", ".html", ".xml", ".tex")


class Source(Protocol):
    """Where sequences come from."""

    def window(self, generator: np.random.Generator, length: int) -> Tokens:
        """Return `length` successive tokens at a place that the generator draws."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStream:
    """Arrays of tokens, read as one after the other; files stay on disk.

    Attributes:
        parts: The arrays.
        starts: Where each begins in the stream.

    """

    parts: tuple[Tokens, ...]
    starts: tuple[int, ...]
    num_tokens: int

    def window(self, generator: np.random.Generator, length: int) -> Tokens:
        """Return `length` successive tokens at a random place."""
        start = int(generator.integers(0, self.num_tokens - length + 1))
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        pieces, offset = [], start - self.starts[first]
        for part in self.parts[first:]:
            piece = part[offset : offset + length]
            pieces.append(piece)
            length -= len(piece)
            offset = 0
            if not length:
                break
        return np.concatenate(pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticStream:
    """Tokens drawn evenly from a vocabulary: for timing, nothing can be learnt from them."""

    vocab_size: int

    def window(self, generator: np.random.Generator, length: int) -> Tokens:
        """Return `length` random tokens."""
        return generator.integers(0, self.vocab_size, length)


def open_data(
    paths: Sequence[Path], *, vocab_size: int, seq_len: int, tokenizer: Path | None = None
) -> TokenStream:
    """Open text or token files as one stream that can serve sequences.

    Args:
        paths: Files and folders; none means the standard library's sources.
        vocab_size: The model's; every token must be below it.
        seq_len: Tokens of a sequence.
        tokenizer: A `tokenizers` JSON file for text; bytes are the tokens without.

    Raises:
        ValueError: A path cannot be read, holds nothing, or has tokens that the model lacks.

    """
    files = list(_files(paths)) if paths else _standard_library()
    is_tokens = {path.suffix in (".bin", ".npy") for path in files}
    if is_tokens == {True, False}:
        raise ValueError("--data mixes token files (.bin, .npy) with text; give one kind")
    if is_tokens == {True}:
        parts = [_read_tokens(path, vocab_size) for path in files]
    elif tokenizer is None:
        parts = [_read_bytes(path) for path in files]
    else:
        parts = [_encode(files, tokenizer)]
    return _stream(parts, vocab_size, seq_len, paths)


def micro_batches(
    source: Source,
    *,
    seed: int,
    step: int,
    sequences: Sequence[int],
    micro_batch_size: int,
    seq_len: int,
    device: torch.device,
) -> list[dict[str, Tensor]]:
    """Return one data-parallel rank's share of a step.

    Args:
        source: Where tokens come from.
        seed: Of the run.
        step: Index of the step.
        sequences: Indices in the global batch that this rank reads, in order.
        micro_batch_size: Sequences per micro-batch.
        seq_len: Tokens per sequence.
        device: Where the tensors go.

    Returns:
        Micro-batches of `input_ids` and next-token `labels`, [micro_batch_size, seq_len].

    """
    windows = [
        source.window(np.random.default_rng((seed, step, index)), seq_len + 1)
        for index in sequences
    ]
    tokens = torch.from_numpy(np.stack(windows).astype(np.int64)).to(device)
    return [
        {"input_ids": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}
        for rows in torch.split(tokens, micro_batch_size)
    ]


def share_of(global_batch_size: int, data_parallel: int, rank: int) -> range:
    """Return the sequences of the global batch that a data-parallel rank reads."""
    size = global_batch_size // data_parallel
    return range(rank * size, (rank + 1) * size)


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield files in a stable order; folders are searched for text and token files."""
    for path in paths:
        if path.is_file():
            yield path
        elif path.is_dir():
            suffixes = (*TEXT_SUFFIXES, ".bin", ".npy")
            found = sorted(p for p in path.rglob("*") if p.is_file() and p.suffix in suffixes)
            if not found:
                raise ValueError(f"no text or token files in {path} (looked for {suffixes})")
            yield from found
        else:
            raise ValueError(f"no such file or folder: {path} (--data)")


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(
        path for path in root.rglob("*.py") if "site-packages" not in path.relative_to(root).parts
    )


def _read_bytes(path: Path) -> Tokens:
    try:
        return np.frombuffer(path.read_bytes() + SEPARATOR, dtype=np.uint8)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error


def _read_tokens(path: Path, vocab_size: int) -> Tokens:
    try:
        if path.suffix == ".npy":
            tokens: Tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            kind = np.uint16 if vocab_size <= LARGEST_UINT16 + 1 else np.uint32
            tokens = np.memmap(path, dtype=kind, mode="r")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a token file: {error}") from error
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"{path} holds {tokens.dtype} of shape {tokens.shape}, not a row of ids")
    return tokens


def _encode(files: Sequence[Path], tokenizer: Path) -> Tokens:
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415  (an extra that few runs need)
    except ImportError as error:
        raise ValueError("--tokenizer needs the tokenizers package: pip install '.[hf]'") from error
    try:
        encoder = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # the package raises nothing narrower
        raise ValueError(f"{tokenizer} is not a tokenizers file: {error}") from error
    texts = [_read_bytes(path).tobytes()[:-1].decode("utf-8", errors="replace") for path in files]
    ids = [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encoder.encode_batch(texts)]
    return np.concatenate(ids)


def _stream(
    parts: Sequence[Tokens], vocab_size: int, seq_len: int, paths: Sequence[Path]
) -> TokenStream:
    where = ", ".join(map(str, paths)) or "the standard library"
    kept = tuple(part for part in parts if len(part))
    num_tokens = sum(map(len, kept))
    if num_tokens <= seq_len:
        raise ValueError(
            f"{where} holds {num_tokens} tokens; one sequence needs {seq_len + 1} (--seq-len)"
        )
    largest = max(int(part.max()) for part in kept)
    if largest >= vocab_size:
        raise ValueError(
            f"{where} has token {largest}, the model's vocabulary has {vocab_size} (0 to "
            f"{vocab_size - 1}); use another tokenizer or model"
        )
    starts = np.cumsum([0, *map(len, kept)])[:-1]
    return TokenStream(parts=kept, starts=tuple(map(int, starts)), num_tokens=num_tokens)
