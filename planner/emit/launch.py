"""Launchers: `launch.sh` for one node at a time, `job.sbatch` for Slurm.

Ranks fill a node before the next one begins (torchrun), so the fastest-varying axis of the plan,
tensor parallelism, stays inside a node. torchrun reads PET_NODE_RANK and PET_MASTER_ADDR where
its flags are left out; the command is therefore the same on every node.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from costmodels.hardware import Cluster
from planner.emit.emission import EmittedFile, Variable
from planner.emit.text import Word, comment, identifier, shell_options, shell_words

MASTER_PORT = 29500  # torch's own default
CHECK_WHY = "# One process looks at plan, flags and data first: what is wrong is said once."


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """A group of options of one command line.

    Attributes:
        name: The bash array that holds them.
        why: What they say, as a comment.
        options: Each with its values; a path names an emitted file.

    """

    name: str
    why: str
    options: tuple[tuple[Word, ...], ...]


def processes_per_node(cluster: Cluster) -> int:
    """Return how many GPUs of a host the job takes."""
    return min(cluster.num_gpus, cluster.gpus_per_node)


def torchrun(cluster: Cluster) -> tuple[str, ...]:
    """Return torchrun with the shape of the cluster."""
    return (
        "torchrun",
        f"--nnodes={cluster.num_nodes}",
        f"--nproc-per-node={processes_per_node(cluster)}",
        f"--master-port={MASTER_PORT}",
    )


def command_of(program: Sequence[Word], groups: Sequence[Options]) -> tuple[str, ...]:
    """Return a program with all its options as one argument list, for the folder of its files."""
    options = (word for group in groups for option in group.options for word in option)
    return tuple(str(word) for word in (*program, *options))


def launch_files(
    title: str,
    cluster: Cluster,
    program: Sequence[Word],
    groups: Sequence[Options],
    environment: Sequence[Variable],
    *,
    node_words: str = "",
    script: str = "",
) -> tuple[EmittedFile, ...]:
    """Return `launch.sh` and `job.sbatch`.

    Args:
        title: What runs, for comments and the job's name; any text.
        cluster: Nodes and GPUs per node.
        program: The command before its options; scripts are looked up where it is called.
        groups: Its options, in order.
        environment: Variables to set, with reasons.
        node_words: Bash that tells a program other than torchrun its node and the first one's
            address, from PET_NODE_RANK and PET_MASTER_ADDR; used where there are several nodes.
        script: Python file beside `launch.sh` that the program runs, from whatever folder it is
            called; it knows `--check`.

    """
    nodes = cluster.num_nodes
    start = shell_words(program) + (f" {node_words}" if node_words and nodes > 1 else "")
    check = []
    if script:
        beside = f'"$HERE"/{shlex.quote(script)}'
        start += f" {beside}"
        check = ["", CHECK_WHY, f'python {beside} --check "$@"']
    head = [
        "#!/usr/bin/env bash",
        f"# {comment(title)}",
        f"# {nodes} x {processes_per_node(cluster)} GPUs. Words after this script are handed on.",
        "set -euo pipefail",
        'HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"',
    ]
    lines = [*head, *_environment(environment, nodes), *check, *_call(start, groups)]
    return (
        EmittedFile(path="launch.sh", text="\n".join(lines) + "\n"),
        EmittedFile(path="job.sbatch", text=_sbatch(title, cluster)),
    )


def _environment(environment: Sequence[Variable], nodes: int) -> list[str]:
    lines = [""]
    for variable in environment:
        lines.append(f"# {comment(variable.reason)}")
        lines.append(f"export {variable.name}={shlex.quote(variable.value)}")
    if nodes > 1:
        lines += [
            "# Run this on every node; job.sbatch does it under Slurm.",
            f'export PET_NODE_RANK="${{NODE_RANK:?set NODE_RANK to 0 .. {nodes - 1}}}"',
            'export PET_MASTER_ADDR="${MASTER_ADDR:?set MASTER_ADDR to the address of node 0}"',
        ]
    return lines


def _call(start: str, groups: Sequence[Options]) -> list[str]:
    lines = []
    for group in groups:
        lines += ["", f"# {comment(group.why)}", f"{group.name}=("]
        lines.append(shell_options(group.options) + ")")
    arrays = "".join(f' "${{{group.name}[@]}}"' for group in groups)
    return [*lines, "", f'exec {start}{arrays} "$@"']


def _sbatch(title: str, cluster: Cluster) -> str:
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"#SBATCH --job-name={identifier(title)[:64]}",
            f"#SBATCH --nodes={cluster.num_nodes}",
            "# One launcher per node starts the ranks of its GPUs.",
            "#SBATCH --ntasks-per-node=1",
            f"#SBATCH --gpus-per-node={processes_per_node(cluster)}",
            "#SBATCH --exclusive",
            "set -euo pipefail",
            "# Submit it from this folder; WORK_DIR is where the program lies, if elsewhere.",
            'cd "${WORK_DIR:-$SLURM_SUBMIT_DIR}"',
            'export LAUNCHER="$SLURM_SUBMIT_DIR/launch.sh"',
            'MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
            "export MASTER_ADDR",
            'srun bash -c \'NODE_RANK="$SLURM_NODEID" exec bash "$LAUNCHER"\'',
            "",
        ]
    )
