"""Sharing: which ranks hold the same weights, which cut their states, and where states lie."""

from dataclasses import dataclass

import torch

from runtime.communication.mesh import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How ranks share the states of a bucket.

    Attributes:
        zero_stage: 0 to 3.
        data: Ranks that hold the same weights and see other tokens.
        zero: The part of `data` that states are cut over.
        replicas: Ranks of `data` that own the same piece.
        copies: Groups over which the gradients of equal copies are summed besides.
        is_counted: This rank's piece counts in norms; its copies elsewhere do not.
        on_host: States that lie in host memory: "optimizer", and "weights" beside it.
        is_owner: Of the stages that hold the parameter, this one writes it to checkpoints.

    """

    zero_stage: int
    data: Group
    zero: Group
    replicas: Group
    copies: tuple[Group, ...]
    is_counted: bool
    is_owner: bool
    on_host: frozenset[str] = frozenset()

    def cuts(self, what: str) -> bool:
        """Whether a rank keeps a piece only of "optimizer", "gradients" or "weights".

        Weights on the host come to the device by the unit, like those of other ranks.
        """
        needed = {"optimizer": 1, "gradients": 2, "weights": 3}[what]
        comes_and_goes = what == "weights" and what in self.on_host
        return self.zero_stage >= needed and (self.zero.size > 1 or comes_and_goes)

    @property
    def is_published(self) -> bool:
        """Whether updated pieces of whole weights are gathered after a step (ZeRO-1 and 2)."""
        return self.cuts("optimizer") and not self.cuts("weights")

    def place(self, what: str, device: torch.device) -> torch.device:
        """Return where a rank keeps its "optimizer" or "weights"."""
        return torch.device("cpu") if what in self.on_host else device
