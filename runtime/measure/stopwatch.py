"""Stopwatch: seconds per call of something that every rank does at the same time.

Ranks share cores, caches and memory, so nothing is timed alone: each repeat runs the same number of
calls on all ranks between two points where they wait for each other, and lasts long enough that the
scheduler's turns even out. The slowest rank counts, because it is the one that others wait for; the
better of a trial and its repeat counts, because whatever else the machine does only adds time.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from runtime.communication import collectives
from runtime.communication.mesh import Group

MAX_GROWTH = 16.0  # of the number of calls from one trial to the next: a first call may be cold


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopwatch:
    """Times calls on all ranks of a world.

    Attributes:
        world: All ranks that measure.
        device: Where the calls compute.
        repeat_seconds: Length of a repeat, about; scheduler turns last some milliseconds.

    """

    world: Group
    device: torch.device
    repeat_seconds: float = 0.05

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the seconds of one call; every rank must ask at the same place in its program."""
        call()  # allocates, loads and tunes what later calls find ready
        num_calls, elapsed = 1, self._run(call, 1)
        while elapsed < self.repeat_seconds / 2:
            growth = min(max(self.repeat_seconds / max(elapsed, 1e-9), 2.0), MAX_GROWTH)
            num_calls = math.ceil(num_calls * growth)
            elapsed = self._run(call, num_calls)
        return min(elapsed, self._run(call, num_calls)) / num_calls

    def _run(self, call: Callable[[], object], num_calls: int) -> float:
        """Return the seconds of the slowest rank."""
        self.agree(0.0)
        start = time.perf_counter()
        for _ in range(num_calls):
            call()
        self.synchronise()
        return self.agree(time.perf_counter() - start)

    def agree(self, value: float) -> float:
        """Return the largest of all ranks' values, after all of them came here."""
        mine = torch.tensor([value], dtype=torch.float64, device=self.device)
        return float(collectives.all_reduce(mine, self.world, "max").item())

    def synchronise(self) -> None:
        """Wait until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
