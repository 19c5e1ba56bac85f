"""How fast the runtime is beside hand-written torch, on the same processes.

    nice -n -10 python examples/against_torch/against_torch.py          all layouts, some minutes
    python examples/against_torch/against_torch.py --try                a small model, for a look
    python examples/against_torch/against_torch.py --only DP2 ZeRO-3

Prints, for each layout, our tokens per second over torch's (median and quartiles over pairs of
turns), the most storage that lives in a step (MiB, fullest rank) and how far the losses of equal
steps lie apart. Both sides: gloo on the CPU, fp32, one thread per rank, the same weights and
tokens, fused AdamW, clipped to the same norm (`by_hand.py`, `ours.py`).
"""

import argparse
import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler tells of every start and stop

from cases import TRIED, WHOLE, cases
from pairs import Compared, compare

from costmodels.units import MIB

LEAST_PAIRS = 2  # quartiles of fewer say nothing


def main() -> int:
    """Compare and print the table."""
    parser = argparse.ArgumentParser(description="Our runtime beside hand-written torch.")
    parser.add_argument("--try", action="store_true", dest="tries", help="a small model, 3 pairs")
    parser.add_argument("--pairs", type=int, help="turns of each side (11; 3 with --try)")
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn")
    parser.add_argument("--only", nargs="+", metavar="LAYOUT", help="some rows of the table")
    options = parser.parse_args()
    size = TRIED if options.tries else WHOLE
    pairs = options.pairs or (3 if options.tries else 11)
    known = {case.name: case for case in cases(size)}
    wanted = options.only or list(known)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        parser.error(f"no layout {unknown[0]!r}; there are {', '.join(known)}")
    if pairs < LEAST_PAIRS or options.steps < 1:
        parser.error(f"--pairs must be at least {LEAST_PAIRS}, --steps at least 1")
    print("| layout | ratio | quartiles | step ours, theirs (s) | peak ours, theirs | loss apart |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in wanted:
        found = compare(known[name], size, pairs=pairs, steps=options.steps)
        print(row(name, found, options.steps), flush=True)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(
        f"\n{pairs} pairs of turns of {options.steps} steps; load {load} on {os.cpu_count()} cores"
    )
    return 0


def row(name: str, found: Compared, steps: int) -> str:
    """Return a line of the table."""
    low, median, high = statistics.quantiles(
        [theirs / ours for ours, theirs in found.seconds], n=4, method="inclusive"
    )
    ours, theirs = (
        statistics.median(seconds) / steps for seconds in zip(*found.seconds, strict=True)
    )
    peaks = ", ".join(f"{peak / MIB:.1f}" for peak in found.peak)
    return (
        f"| {name} | {median:.3f} | {low:.3f} to {high:.3f} | {ours:.3f}, {theirs:.3f} "
        f"| {peaks} MiB | {found.loss_difference:.1e} |"
    )


if __name__ == "__main__":
    sys.exit(main())
