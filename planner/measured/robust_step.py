"""One robust, bounded step of a fit: the linearised loss of `planner.measured.fit` at its least.

Huber's loss is minimised by reweighted least squares; what a Newton step would carry over a bound
stays on it and the rest is solved anew.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

HUBER = 0.1  # chosen: errors above 10 % pull with a constant force
# Chosen: of the mean over constants, against 1 for the level of all families (and fit_loss.ORDER
# for the order within grids, where there are any); matters only where few runs tell.
PULL = 0.005
REWEIGHTINGS = 20


class Bounded(Protocol):
    """A constant to be found: its bounds, and where it stands if no sample tells."""

    @property
    def low(self) -> float:
        """Smallest value."""

    @property
    def high(self) -> float:
        """Largest value."""

    @property
    def middle(self) -> float:
        """Where it is pulled."""

    @property
    def width(self) -> float:
        """Standard deviation of its logarithm before any sample."""


def solve(
    parameters: Sequence[Bounded], logs: Array, errors: Array, slopes: Array, weights: Array
) -> Array:
    """Return where the linearised loss is least within the bounds.

    Args:
        parameters: Bounds and where each constant is pulled.
        logs: Where errors and slopes were taken.
        errors: log(predicted / measured) there.
        slopes: Their derivatives.
        weights: Importance of each sample.

    """
    low, high = (np.log([getattr(p, name) for p in parameters]) for name in ("low", "high"))
    middle = np.log([p.middle for p in parameters])
    pull = PULL / np.array([p.width for p in parameters]) ** 2 / max(len(parameters), 1)
    at = logs
    for _ in range(REWEIGHTINGS):
        left = errors + slopes @ (at - logs)
        soft = weights * HUBER / np.maximum(np.abs(left), HUBER)
        curvature = slopes.T @ (soft[:, None] * slopes) + np.diag(pull)
        gradient = slopes.T @ (soft * left) + pull * (at - middle)
        at = _bounded_step(at, curvature, gradient, low, high)
    return at


def _bounded_step(at: Array, curvature: Array, gradient: Array, low: Array, high: Array) -> Array:
    """Take a Newton step; what would leave its bounds stays on them and the rest is solved anew."""
    free = np.ones(at.size, dtype=bool)
    moved = at.copy()
    while free.any():
        fixed = ~free
        right = -gradient[free] - curvature[np.ix_(free, fixed)] @ (moved - at)[fixed]
        moved[free] = at[free] + np.linalg.solve(curvature[np.ix_(free, free)], right)
        outside = free & ((moved < low) | (moved > high))
        if not outside.any():
            break
        moved[outside] = np.clip(moved, low, high)[outside]
        free &= ~outside
    return moved
