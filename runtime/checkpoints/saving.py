"""Saving and resuming a run, on all ranks alike.

A checkpoint holds the whole run (`sharded_state.py`) and what the run is (`RunRecord`), so that any
plan of the same model can go on from it. It is written at once, or from a copy on the host by a
thread while training goes on. Whatever fails on one rank fails on all, with the reason; what was
whole stays (`folders.py`).
"""

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
from runtime.checkpoints.files import MANIFEST, Manifest, read_manifest
from runtime.checkpoints.folders import (
    NO_STEP,
    candidates,
    finish,
    folder_of,
    prepare,
    step_name,
    unfinished_folder,
)
from runtime.checkpoints.sharded_state import (
    State,
    check_contents,
    read_state,
    state_of,
    write_state,
)
from runtime.communication import collectives
from runtime.communication.mesh import Group, Mesh
from runtime.models.same import differences
from runtime.states.optimizer import OptimizerSettings, ShardedOptimizer
from runtime.states.zero import ShardedStates

# What torch raises for files: of many kinds, or all ranks' gathered, which is no Exception.
FAULTS = (Exception, CheckpointException)

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
        except FAULTS as error:
            raise ValueError(f"cannot read the checkpoint {folder}: {reason_of(error)}") from error
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
            step = self._from_first_rank(mine[attempt] if mine else NO_STEP)
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
        folder = self._folder
        unfinished = unfinished_folder(folder, num_steps)
        record = encode(replace(self._record, num_steps=num_steps))
        doing = f"write the checkpoint {folder / step_name(num_steps)}"
        self._agreed_first(lambda: prepare(folder, num_steps), doing)
        try:
            write_state(unfinished, state, record, self._group)
        except FAULTS as error:
            if self._mesh.rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise ValueError(f"cannot {doing}: {reason_of(error)}") from error
        self._agreed_first(lambda: finish(folder, num_steps, self._keep), doing)

    def _opened(self, folder: Path, state: State) -> tuple[Manifest, RunRecord]:
        manifest = read_manifest(folder)
        record = record_of(folder, manifest)
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

    def _agreed_first(self, action: Callable[[], object], doing: str) -> None:
        """Do something on rank 0, and fail on all ranks if it fails there."""
        self._agreed(action if self._mesh.rank == 0 else lambda: None, doing)

    def _from_first_rank(self, value: int) -> int:
        """Return rank 0's value on all ranks."""
        mine = torch.tensor([value if self._mesh.rank == 0 else NO_STEP])
        return int(collectives.all_reduce(mine, self._group, "max").item())


def record_of(folder: Path, manifest: Manifest) -> RunRecord:
    """Return what the run was that wrote a checkpoint.

    Raises:
        ValueError: The manifest does not say; the message names it.

    """
    try:
        return decode(RunRecord, manifest.run, "run")
    except DecodeError as error:
        raise ValueError(f"{folder / MANIFEST} is damaged: {error}") from error


def reason_of(error: BaseException) -> str:
    """Return what went wrong, in one line; of several ranks' faults, the first."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (first, _) = min(error.failures.items())
        return f"rank {rank}: {reason_of(first)}"
    return " ".join(str(error).split())[:300] or type(error).__name__
