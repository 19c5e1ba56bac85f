"""What the search costs: CPU seconds of the whole command, start-up included, job by job.

    python examples/benchmark_search.py             all jobs (about two minutes)
    python examples/benchmark_search.py 70b-64      one of them
    python examples/benchmark_search.py --growth    one model on 8 to 16,384 GPUs

Every job is a fresh process, so nothing is warm; seconds are user and system time of that process,
which other work on the machine stretches less than the clock.
"""

import argparse
import json
import resource
import subprocess
import sys
from dataclasses import dataclass

# Seconds that each job may take at most on one core; a range or "auto" counts all its searches.
JOBS = {
    "70b-64": (2, "--model 70b --gpus 64 --seq-len 8192 --global-batch-size 512"),
    "175b-512": (
        4,
        "--model 175b --gpus 512 --hardware a100-sxm-80gb --seq-len 2048 --global-batch-size 1536",
    ),
    "405b-16384": (8, "--model 405b --gpus 16384 --seq-len 8192 --global-batch-size 2048"),
    "deepseek-v3-2048": (
        10,
        (
            "--model deepseek-v3 --gpus 2048 --hardware h800-sxm-80gb --seq-len 4096 "
            "--global-batch-size 15360"
        ),
    ),
    "405b-131072": (
        15,
        (
            "--model 405b --gpus 131072 --gpus-per-node 64 --hardware gb200-nvl72 --seq-len 8192 "
            "--global-batch-size 16384"
        ),
    ),
    "70b-auto": (10, "--model 70b --gpus auto --seq-len 8192 --global-batch-size 512"),
    "405b-auto": (10, "--model 405b --gpus auto --seq-len 8192 --global-batch-size 2048"),
    "70b-8..1024": (10, "--model 70b --gpus 8..1024 --seq-len 8192 --global-batch-size 1024"),
    "405b-16-nothing-fits": (8, "--model 405b --gpus 16 --seq-len 8192 --global-batch-size 512"),
}
GROWTH = (8, 32, 128, 512, 2048, 8192, 16384)


@dataclass(frozen=True)
class Measured:
    """One command: its CPU seconds and what it said."""

    seconds: float
    status: str
    num_layouts: int


def measure(flags: str) -> Measured:
    """Run `planner search` in a process of its own."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "planner", "search", *flags.split(), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)  # noqa: S603 - our own words
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    try:
        answer = json.loads(done.stdout)
    except json.JSONDecodeError:
        return Measured(seconds=seconds, status=f"exit status {done.returncode}", num_layouts=0)
    if "error" in answer:
        return Measured(seconds=seconds, status=f"error: {answer['error']}", num_layouts=0)
    return Measured(seconds=seconds, status=answer["status"], num_layouts=answer["num_layouts"])


def main() -> int:
    """Print a table; 1 where a job takes longer than it may, or is not proved."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"of {', '.join(JOBS)}")
    parser.add_argument("--growth", action="store_true", help="8b on ever more GPUs")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.jobs) - set(JOBS))
    if unknown:
        parser.error(f"no job {', '.join(unknown)}; there are {', '.join(JOBS)}")
    print(f"{'job':<22} {'CPU s':>7} {'at most':>8} {'layouts':>20} {'per s':>9}  status")
    if arguments.growth:
        rows = [(f"8b-{n}", None, f"--model 8b --gpus {n} --seq-len 8192") for n in GROWTH]
    else:
        rows = [(name, *JOBS[name]) for name in arguments.jobs or JOBS]
    missed = 0
    for name, most, flags in rows:
        found = measure(flags)
        allowed = "" if most is None else f"{most} s"
        rate = found.num_layouts / found.seconds
        print(
            f"{name:<22} {found.seconds:>7.2f} {allowed:>8} {found.num_layouts:>20,} "
            f"{rate:>9.1e}  {found.status}",
            flush=True,
        )
        missed += most is not None and found.seconds > most
        missed += found.status not in {"optimal", "infeasible"}
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
