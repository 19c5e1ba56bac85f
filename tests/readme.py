"""The README's console blocks: run again, compared, or written anew.

    python tests/readme.py          writes what the commands print today into README.md

A block fenced as `console` holds commands behind "$ " and below each what it prints on stdout.
Commands that need a GPU, an installation or minutes stand in `sh` blocks, which are not run.
"""

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)


def run(command, folder):
    """Run one `planner` command in a folder and return what a person reads of it.

    That is its stdout; its stderr where the result goes to a file (the table of validate).
    """
    program, *words = shlex.split(command, comments=True)
    assert program == "planner", f"only planner commands stand in console blocks: {command}"
    done = subprocess.run(
        [sys.executable, "-m", "planner", *words],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout or done.stderr


def commands(block):
    """Return the commands of a block, comments and output left out."""
    return [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]


def blocks(text):
    """Return the console blocks of a README."""
    return BLOCK.findall(text)


def render(block, folder):
    """Return a block with what its commands print today."""
    here = Path(folder) / "tests"
    if not here.exists():
        here.symlink_to(ROOT / "tests")
    lines = []
    for command in commands(block):
        lines.append(f"$ {command}")
        lines += [line.rstrip() for line in run(command, folder).rstrip().splitlines()]
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def rendered(text):
    """Return a README with all its console blocks made anew."""
    with tempfile.TemporaryDirectory() as folder:
        return BLOCK.sub(lambda match: f"```console\n{render(match[1], folder)}```", text)


if __name__ == "__main__":
    README.write_text(rendered(README.read_text()))
