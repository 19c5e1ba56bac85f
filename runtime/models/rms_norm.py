"""RMSNorm: x / rms(x) * weight over the last dim (Zhang and Sennrich, arXiv:1910.07467)."""

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own idiom)
from torch import Tensor, nn


class RmsNorm(nn.Module):
    """x / rms(x) * weight over the last dim."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalise."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)
