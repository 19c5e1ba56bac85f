"""Seconds of one block by phase and cause, while its ops are priced and when they are.

Phases: forward, backward_input (torch's I), backward_weight (W), recompute (what running the whole
forward again adds) and selective (the same for the modules that the job recomputes). Causes are
the names of terms. Everything is an array over rows, one row per shard; one layout is one row.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodels.compiled.compute import Value
from costmodels.network.ops import Block, Op, skipped_by_recompute
from costmodels.time.collectives import Pricing

Seconds = NDArray[np.float64]

FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, RECOMPUTE, SELECTIVE = range(5)
NUM_PHASES = 5
CAUSES = (
    "matmul",
    "attention",
    "memory_bound",
    "launch",
    "loss",
    "tp_collectives",
    "cp_attention",
    "ep_dispatch",
)
_INDEX = {cause: i for i, cause in enumerate(CAUSES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCosts:
    """Seconds of blocks: arrays of shape [phases, causes, rows].

    Attributes:
        exposed: What the phase takes; nothing hides it.
        alone: Communication by itself; equal to `exposed` for local work.

    """

    exposed: Seconds
    alone: Seconds

    @property
    def total(self) -> Seconds:
        """Seconds of each phase: [phases, rows]."""
        total: Seconds = self.exposed.sum(axis=1)
        return total


class Tally:
    """Seconds of one block while its ops are priced."""

    def __init__(self, block: Block, pricing: Pricing) -> None:
        shape = (NUM_PHASES, len(CAUSES), pricing.num_rows)
        self.exposed = np.zeros(shape)
        self.alone = np.zeros(shape)
        self.waits = np.zeros((NUM_PHASES, 1))
        self.kernels = np.zeros((NUM_PHASES, pricing.num_rows))
        self.modules = dict(pricing.recompute_modules)
        self.skipped = skipped_by_recompute(block) if pricing.stops_early else frozenset()

    def add(
        self, phase: int, cause: str, exposed: Value, kernels: Value = 1, *, alone: Value = None
    ) -> None:
        """Add seconds to a phase."""
        self.exposed[phase, _INDEX[cause]] += exposed
        self.alone[phase, _INDEX[cause]] += exposed if alone is None else alone
        self.kernels[phase] += kernels

    def add_forward(
        self, op: Op, cause: str, exposed: Value, kernels: Value = 1, *, alone: Value = None
    ) -> None:
        """Add forward seconds, and what running the op again costs."""
        self.add(FORWARD, cause, exposed, kernels, alone=alone)
        if op.name not in self.skipped:
            self.add(RECOMPUTE, cause, exposed, kernels, alone=alone)
        share = self.modules.get(op.module, 0.0)
        if share:
            self.exposed[SELECTIVE, _INDEX[cause]] += share * exposed
            self.alone[SELECTIVE, _INDEX[cause]] += share * (exposed if alone is None else alone)
            self.kernels[SELECTIVE] += share * kernels

    def wait_for_device(self, seconds: float) -> None:
        """Let the host read a result of the device in forward, and when that runs again."""
        self.waits[[FORWARD, RECOMPUTE]] += seconds

    def finish(self, host_launch: float) -> BlockCosts:
        """Add what waiting for the host's launches costs, and return the block's costs."""
        waiting = self.kernels * host_launch + self.waits - self.exposed.sum(axis=1)
        waiting = np.maximum(waiting, 0.0)
        self.exposed[:, _INDEX["launch"]] += waiting
        self.alone[:, _INDEX["launch"]] += waiting
        return BlockCosts(exposed=self.exposed, alone=self.alone)
