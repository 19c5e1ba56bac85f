"""Folders of checkpoints: their names, which of them to trust, and moves that survive a kill.

    checkpoints/step-00000200/      a whole checkpoint: it has a manifest
    checkpoints/step-00000200.old/  one whose place is being taken; it still counts
    checkpoints/latest              the name of the last one, a line of text
    checkpoints/.*                  unfinished, or on its way out; never read

A folder gets its name when it is whole and on the disk, and loses it before its first file goes: a
kill at any moment leaves the last good one under a name that is read.
"""

import os
import shutil
from pathlib import Path

from planner.files import read_text, write_text
from runtime.checkpoints.files import MANIFEST

LATEST = "latest"
_PREFIX, _REPLACED = "step-", ".old"
NO_STEP = -1


def prepare(folder: Path, num_steps: int) -> Path:
    """Return an empty folder to write a checkpoint into; what killed runs left behind goes.

    Raises:
        OSError: It cannot be made.

    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f".{_PREFIX}*"):
        shutil.rmtree(left)
    unfinished = unfinished_folder(folder, num_steps)
    unfinished.mkdir()
    return unfinished


def finish(folder: Path, num_steps: int, keep: int) -> None:
    """Give a whole checkpoint its name, point at it, and let the oldest go.

    Args:
        folder: Where the run's checkpoints lie.
        num_steps: Of the one that `prepare` made and that is written now.
        keep: How many stay; 0 keeps all.

    Raises:
        OSError: A folder cannot be renamed or removed.
        ValueError: The pointer cannot be written.

    """
    unfinished = unfinished_folder(folder, num_steps)
    final = folder / step_name(num_steps)
    replaced = final.with_name(final.name + _REPLACED)
    _flush(unfinished)
    if final.exists():
        _remove(replaced)
        final.rename(replaced)
    unfinished.rename(final)
    _flush(folder)
    write_text(folder / LATEST, f"{final.name}\n")
    _remove(replaced)
    for step in candidates(folder)[keep:] if keep else []:
        _remove(folder_of(folder, step))


def unfinished_folder(folder: Path, num_steps: int) -> Path:
    """Return where a checkpoint is written before it has its name."""
    return folder / f".{step_name(num_steps)}.part"


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
        last = max(steps, default=NO_STEP)
    return sorted(steps, key=lambda step: (step > last, -step))


def _pointed(folder: Path) -> int:
    try:
        name = read_text(folder / LATEST).strip()
    except ValueError:  # not there yet
        return NO_STEP
    number = name.removeprefix(_PREFIX)
    return int(number) if number.isdecimal() else NO_STEP


def _remove(folder: Path) -> None:
    """Remove a checkpoint; while its files go, it has no name that is read."""
    if folder.exists():
        gone = folder.rename(folder.with_name(f".{folder.name}.gone"))
        shutil.rmtree(gone)


def _flush(folder: Path) -> None:
    """Make a folder's names last through a power cut; its files have been flushed before."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
