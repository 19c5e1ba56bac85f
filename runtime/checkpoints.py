"""The checkpoints of a run: one folder each, whole or not there, and how a run finds its last one.

    checkpoints/step-00000200/    a whole checkpoint (`checkpoint_files.py`)
    checkpoints/latest            the name of the last one, a line of text
    checkpoints/.*                unfinished, or on its way out; never read

A checkpoint is written under a name that begins with a dot, flushed to the disk, and renamed when
it is whole; then `latest` is replaced and the oldest go. One that takes the place of another of the
same step renames that one first (`.old` at the end, which still counts): a kill at any moment
leaves the last good one under a name that is read.

Written at once, or from a copy on the host by a thread while training goes on.
"""

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from costmodels.model import ModelSpec
from planner.codec import DecodeError, decode, encode
from planner.files import read_text, write_text
from runtime import collectives
from runtime.checkpoint_files import MANIFEST, Manifest, read_manifest
from runtime.mesh import Group, Mesh
from runtime.models.same import differences
from runtime.optimizer import OptimizerSettings, ShardedOptimizer
from runtime.sharded_state import State, check_contents, read_state, state_of, write_state
from runtime.zero import ShardedStates

FOLDER, LATEST = "checkpoints", "latest"
_PREFIX, _REPLACED = "step-", ".old"
_NONE = -1

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """What decides which sequences a step reads.

    Attributes:
        source: The data, in words.
        seed: Of the samples.
        seq_len: Tokens of a sequence.
        global_batch_size: Sequences of a step.

    """

    source: str
    seed: int
    seq_len: int
    global_batch_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What a run is, whatever its plan.

    Attributes:
        num_steps: Optimizer steps that are done: the place in data and schedule.
        optimizer: With the schedule.

    """

    num_steps: int
    model: ModelSpec
    optimizer: OptimizerSettings
    samples: Samples


class Checkpoints:
    """Saves and finds the checkpoints of a run; every method is called by all ranks alike."""

    def __init__(
        self,
        folder: Path,
        mesh: Mesh,
        group: Group,
        record: RunRecord,
        *,
        keep: int = 0,
        in_background: bool = False,
    ) -> None:
        """Prepare.

        Args:
            folder: Where the run's checkpoints lie.
            mesh: Where this rank stands.
            group: All ranks, over the host, used by nothing else.
            record: What the run is.
            keep: How many checkpoints stay; 0 keeps all.
            in_background: Training goes on while files are written; costs a copy of this rank's
                states in the host's memory.

        """
        self._folder = folder
        self._mesh = mesh
        self._group = group
        self._record = record
        self._keep = keep
        self._writer = ThreadPoolExecutor(1, "checkpoint") if in_background else None
        self._writing: Future[None] | None = None

    def save(
        self,
        states: ShardedStates,
        optimizer: ShardedOptimizer,
        buffers: Mapping[str, Tensor],
        num_steps: int,
    ) -> None:
        """Write the run's state after a number of steps.

        Raises:
            ValueError: This checkpoint, or the one before it in the background, cannot be written;
                those that were whole still are.

        """
        self.wait()
        state: State = state_of(self._mesh, states, optimizer, buffers)
        if self._writer is None:
            self._write(state, num_steps)
        else:
            copies = {name: blocks.copied() for name, blocks in state.items()}
            self._writing = self._writer.submit(self._write, copies, num_steps)

    def wait(self) -> None:
        """Complete the checkpoint that is being written in the background, if one is.

        Raises:
            ValueError: It cannot be written.

        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def load(
        self,
        folder: Path,
        states: ShardedStates,
        optimizer: ShardedOptimizer,
        buffers: Mapping[str, Tensor],
    ) -> RunRecord:
        """Read a checkpoint into this plan's pieces.

        Returns:
            The run that wrote it.

        Raises:
            ValueError: There is no such checkpoint, it is damaged, or it is of another model or
                optimizer; all ranks raise.

        """
        optimizer.create_states()
        state = state_of(self._mesh, states, optimizer, buffers)
        manifest, record = self._agreed(lambda: self._opened(folder, state), f"read {folder}")
        try:
            read_state(folder, manifest, state, self._group)
        except Exception as error:  # torch raises many kinds; the same on all ranks
            raise ValueError(f"cannot read the checkpoint {folder}: {_reason(error)}") from error
        optimizer.resume(record.num_steps)
        states.publish()
        return record

    def load_latest(
        self,
        states: ShardedStates,
        optimizer: ShardedOptimizer,
        buffers: Mapping[str, Tensor],
    ) -> RunRecord | None:
        """Read the last checkpoint; a damaged one is reported and the one before it read.

        Returns:
            The run that wrote it; None if there are no checkpoints.

        Raises:
            ValueError: None of them can be read.

        """
        mine = candidates(self._folder) if self._mesh.rank == 0 else []
        faults = []
        for attempt in range(self._from_first_rank(len(mine))):
            step = self._from_first_rank(mine[attempt] if mine else _NONE)
            try:
                return self.load(folder_of(self._folder, step), states, optimizer, buffers)
            except ValueError as error:
                faults.append(str(error))
                if self._mesh.rank == 0:
                    print(f"warning: {error}", file=sys.stderr)  # noqa: T201  (progress)
        if faults:
            raise ValueError(faults[0])
        return None

    def _write(self, state: State, num_steps: int) -> None:
        final = self._folder / step_name(num_steps)
        unfinished = self._folder / f".{final.name}.part"
        record = encode(replace(self._record, num_steps=num_steps))
        doing = f"write the checkpoint {final}"
        self._agreed(lambda: self._prepare(unfinished), doing)
        try:
            write_state(unfinished, state, record, self._group)
        except Exception as error:  # torch raises many kinds; the same on all ranks
            if self._mesh.rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise ValueError(f"cannot {doing}: {_reason(error)}") from error
        self._agreed(lambda: self._finish(unfinished, final), doing)

    def _prepare(self, unfinished: Path) -> None:
        if self._mesh.rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            for left in self._folder.glob(f".{_PREFIX}*"):  # of runs that were killed
                shutil.rmtree(left)
            unfinished.mkdir()

    def _finish(self, unfinished: Path, final: Path) -> None:
        """Give a whole checkpoint its name, point at it, and let the oldest go."""
        if self._mesh.rank != 0:
            return
        _flush_folder(unfinished)
        replaced = final.with_name(final.name + _REPLACED)
        if final.exists():
            _remove(replaced)
            final.rename(replaced)
        unfinished.rename(final)
        _flush_folder(self._folder)
        write_text(self._folder / LATEST, f"{final.name}\n")
        _remove(replaced)
        for step in candidates(self._folder)[self._keep :] if self._keep else []:
            _remove(folder_of(self._folder, step))

    def _opened(self, folder: Path, state: State) -> tuple[Manifest, RunRecord]:
        manifest = read_manifest(folder)
        try:
            record = decode(RunRecord, manifest.run, "run")
        except DecodeError as error:
            raise ValueError(f"{folder / MANIFEST} is damaged: {error}") from error
        if differing := differences(record.model, self._record.model):
            name = self._record.model.name
            raise ValueError(
                f"the checkpoint {folder} is of another model than {name}: {differing}"
            )
        check_contents(folder, manifest, state)
        return manifest, record

    def _agreed(self, action: Callable[[], Answer], doing: str) -> Answer:
        """Do something that may fail on some ranks, and fail on all if it does."""
        fault = None
        try:
            answer = action()
        except (OSError, ValueError) as error:
            fault = str(error) if isinstance(error, ValueError) else f"cannot {doing}: {error}"
        failed = torch.tensor([int(fault is not None)])
        failed = collectives.all_reduce(failed, self._group, "max")
        if fault is not None or failed.item():
            raise ValueError(fault or f"cannot {doing}: another rank says why")
        return answer

    def _from_first_rank(self, value: int) -> int:
        """Return rank 0's value on all ranks."""
        mine = torch.tensor([value if self._mesh.rank == 0 else _NONE])
        return int(collectives.all_reduce(mine, self._group, "max").item())


def step_name(num_steps: int) -> str:
    """Return the name of the checkpoint after a number of steps."""
    return f"{_PREFIX}{num_steps:08d}"


def folder_of(folder: Path, num_steps: int) -> Path:
    """Return where the checkpoint after a number of steps lies."""
    plain = folder / step_name(num_steps)
    return plain if (plain / MANIFEST).is_file() else plain.with_name(plain.name + _REPLACED)


def candidates(folder: Path) -> list[int]:
    """Return the steps of a run's whole checkpoints, the one to go on from first.

    That is the one that `latest` names; then those before it, the nearest first; then what lies
    behind it, left by a run that was taken back.
    """
    steps = {
        int(path.parent.name.removeprefix(_PREFIX).removesuffix(_REPLACED))
        for path in folder.glob(f"{_PREFIX}[0-9]*/{MANIFEST}")
    }
    last = _pointed(folder)
    if last not in steps:
        last = max(steps, default=_NONE)
    return sorted(steps, key=lambda step: (step > last, -step))


def _pointed(folder: Path) -> int:
    try:
        name = read_text(folder / LATEST).strip()
    except ValueError:  # not there yet
        return _NONE
    number = name.removeprefix(_PREFIX)
    return int(number) if number.isdecimal() else _NONE


def _remove(folder: Path) -> None:
    """Remove a checkpoint; while its files go, it has no name that is read."""
    if folder.exists():
        gone = folder.rename(folder.with_name(f".{folder.name}.gone"))
        shutil.rmtree(gone)


def _flush_folder(folder: Path) -> None:
    """Make names in a folder last through a power cut; the files' contents are flushed before."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: BaseException) -> str:
    """Return what went wrong, in one line; of several ranks' faults, the first."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (first, _) = min(error.failures.items())
        return f"rank {rank}: {_reason(first)}"
    return " ".join(str(error).split())[:300] or type(error).__name__
