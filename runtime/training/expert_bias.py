"""Loads of experts evened out by the corrections of their routers, without a loss.

After each step, a correction grows by the rate where its expert got fewer choices than the mean
of its layer, and shrinks by it where it got more. Corrections enter the choice of experts and no
weight, so nothing is differentiated. Every rank holds all corrections and sums all choices of the
step, so they stay equal on all ranks, and under every layout.

Source: Wang et al., arXiv:2408.15664, algorithm 1; DeepSeek-V3, arXiv:2412.19437, section 2.1.2.
"""

import torch

from planner.plan import Plan
from runtime.checkpoints.sharded_state import TRAINED_BUFFERS
from runtime.communication import collectives
from runtime.communication.mesh import Mesh
from runtime.passes.dispatch_experts import LOAD
from runtime.program import Program

(_CORRECTION,) = TRAINED_BUFFERS


def check_bias_updates(plan: Plan, rate: float) -> None:
    """Refuse a rate for a model whose routers have nothing to correct.

    Args:
        plan: Of the run.
        rate: What a step would move corrections by; 0 leaves them.

    Raises:
        ValueError: Names the flag and the model.

    """
    moe = plan.model.moe
    if rate and (moe is None or not moe.correction_bias):
        raise ValueError(
            f"--bias-update-rate {rate}: {plan.model.name} has no routers that correct their "
            "choice (DeepSeek-V3 has)"
        )


class BiasUpdates:
    """The routers of a rank's stages."""

    def __init__(self, program: Program, mesh: Mesh, rate: float) -> None:
        """Take hold of corrections and counts.

        Args:
            program: Its buffers lie on the device.
            mesh: Where this rank stands.
            rate: What a step moves a correction by.

        """
        self._mesh, self._rate = mesh, rate
        buffers = [dict(unit.named_buffers()) for stage in program.stages for unit in stage.units]
        self._pairs = [
            (buffer, found[name.removesuffix(_CORRECTION) + LOAD])
            for found in buffers
            for name, buffer in found.items()
            if name.endswith(_CORRECTION)
        ]

    def step(self) -> float:
        """Move the corrections by a step's choices, which are forgotten.

        Returns:
            How far the fullest expert of this rank's layers is above its layer's mean: 0.5 is half
            as many again. 0 for a rank without routers.

        """
        if not self._pairs:
            return 0.0
        loads = torch.stack([load for _, load in self._pairs])
        for axis in ("dp_cp", "tp"):  # ranks along these route other tokens of the same layers
            loads = collectives.all_reduce(loads, self._mesh.group(axis))
        shares = loads.to(torch.float64)
        mean = shares.mean(-1, keepdim=True)
        for (correction, load), missing in zip(self._pairs, mean - shares, strict=True):
            correction.add_(missing.sign().to(correction.dtype), alpha=self._rate)
            load.zero_()
        return float((shares / mean.clamp(min=1)).max() - 1)
