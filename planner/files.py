"""Files: read with one clear message on failure, written whole or not at all."""

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

MAX_BYTES = 512 * 2**20  # chosen: no plan, config or profile is near it


def read_text(path: Path) -> str:
    """Return a UTF-8 file's text.

    Raises:
        ValueError: The file is absent, a folder, unreadable, too large or not UTF-8; the message
            names it.

    """
    try:
        status = path.stat()
        if stat.S_ISCHR(status.st_mode):  # /dev/zero never ends
            raise ValueError(f"{path} is a device, no file")
        if status.st_size > MAX_BYTES:
            raise ValueError(f"{path} is larger than {MAX_BYTES // 2**20} MiB")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error


def read_json(path: Path) -> object:
    """Return a JSON file's value; NaN, Infinity and repeated keys are refused.

    Raises:
        ValueError: The file cannot be read or is no JSON; the message names it.

    """

    def refuse_number(name: str) -> NoReturn:
        raise ValueError(f"{name} is no JSON number")

    def refuse_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
        keys = [key for key, _ in pairs]
        repeated = (
            [key for key in keys if keys.count(key) > 1] if len(set(keys)) < len(keys) else []
        )
        if repeated:
            raise ValueError(f"the key {repeated[0]!r} stands twice")
        return dict(pairs)

    text = read_text(path)
    try:
        return json.loads(text, parse_constant=refuse_number, object_pairs_hook=refuse_repeats)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, as UTF-8; see `write_bytes`."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically: readers see the old content or the new one, never a part.

    A link stays a link and what it names is written; a device or a pipe is written to, not
    replaced. A file keeps its permissions, a new one gets those of the user's umask.

    Raises:
        ValueError: The file cannot be written; what stood there stays.

    """
    refuse_unwritable(path)
    name = None
    try:
        if _is_special(path):
            path.write_bytes(content)
            return
        target = Path(os.path.realpath(path))
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~_umask()
        with tempfile.NamedTemporaryFile(
            dir=target.parent, prefix=f".{target.name}.", delete=False
        ) as file:
            name = file.name
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, mode)  # noqa: PTH101  # the temporary file was private
        os.replace(name, target)  # noqa: PTH105  # atomic on one file system
    except OSError as error:
        if name is not None:
            Path(name).unlink(missing_ok=True)
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from error


def refuse_unwritable(path: Path) -> None:
    """Refuse a file that `write_bytes` could not write, before hours of work go into it.

    Raises:
        ValueError: Its folder is absent or closed, or it is a folder or write-protected.

    """
    try:
        problem = _unwritable(path)
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        raise ValueError(f"cannot write {path}: {problem}")


def _unwritable(path: Path) -> str | None:
    if path.is_dir():
        return "Is a directory"
    if path.exists() and not os.access(path, os.W_OK):
        return "Permission denied"
    if path.exists() and _is_special(path):
        return None
    parent = Path(os.path.realpath(path)).parent
    if not parent.is_dir():
        return f"No such file or directory: {parent}"
    return None if os.access(parent, os.W_OK | os.X_OK) else f"Permission denied: {parent}"


def _is_special(path: Path) -> bool:
    """Whether a path is a device, a pipe or a socket."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _umask() -> int:
    """Return the process's umask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def write_folder(folder: Path, texts: Mapping[str, str]) -> None:
    """Write a new folder whole: it appears with all its files or not at all.

    Shell scripts are made executable.

    Raises:
        ValueError: The folder exists and is not empty, or cannot be written.

    """
    folder = folder.resolve()
    staging = None
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"{folder} is there and not empty; name a new folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        for name, text in texts.items():
            path = staging / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            if path.suffix == ".sh":
                path.chmod(0o755)
        staging.chmod(0o755)  # it was private while it was incomplete
        if folder.exists():
            folder.rmdir()
        staging.rename(folder)
    except OSError as error:
        raise ValueError(f"cannot write {folder}: {error.strerror or error}") from error
    finally:
        if staging is not None and staging.exists():
            shutil.rmtree(staging, ignore_errors=True)
