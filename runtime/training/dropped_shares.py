"""The share of choices that experts over their capacity dropped in a step (`ops/capacity.py`)."""

import torch

from planner.plan import Plan
from runtime.communication import collectives
from runtime.communication.mesh import Mesh
from runtime.passes.dispatch_experts import DROPPED
from runtime.program import Program


def check_capacity(plan: Plan, factor: float) -> None:
    """Refuse a limit for a model without experts.

    Args:
        plan: Of the run.
        factor: Capacity over the mean number of choices per expert; 0 sets no limit.

    Raises:
        ValueError: Names the flag and the model.

    """
    if factor and plan.model.moe is None:
        raise ValueError(f"--capacity-factor {factor:g}: {plan.model.name} has no experts")


class DroppedShares:
    """The counts of a rank's layers with experts."""

    def __init__(self, program: Program, mesh: Mesh) -> None:
        """Take hold of the counts.

        Args:
            program: Lowered with a capacity; its buffers lie on the device.
            mesh: Where this rank stands.

        """
        self._mesh = mesh
        self._counts = [
            buffer
            for stage in program.stages
            for unit in stage.units
            for name, buffer in unit.named_buffers()
            if name.endswith(DROPPED)
        ]

    def step(self) -> float:
        """Return the share of a step's choices that was dropped, which is forgotten.

        The mean over layers, so that layers that count twice (recomputation) weigh no more: the
        same on all ranks and under every layout.
        """
        shares = torch.zeros(2, dtype=torch.float64, device=self._mesh.device)
        if self._counts:
            counts = torch.stack(self._counts)
            for axis in ("dp_cp", "tp"):  # ranks along these route other tokens of the same layers
                counts = collectives.all_reduce(counts, self._mesh.group(axis))
            dropped, made = counts.to(torch.float64).unbind(-1)
            shares[0], shares[1] = (dropped / made.clamp(min=1)).sum(), len(counts)
            for buffer in self._counts:
                buffer.zero_()
        shares = collectives.all_reduce(shares, self._mesh.group("pp"))
        return float(shares[0] / shares[1].clamp(min=1))
