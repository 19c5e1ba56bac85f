"""Bounded, robust least squares for a handful of constants, on numpy alone.

Fits positive constants c to samples by their relative error: the residual of a sample is
log(predicted / measured), the loss is Huber's, so that a stray sample pulls with a constant force,
and steps are Levenberg-Marquardt's in log c, clipped to the bounds. Derivatives are differences:
the formulas have kinks (max, ceil) where symbolic ones would mislead.

Source: Levenberg, Quarterly of Applied Mathematics 2 (1944); Marquardt, SIAM Journal 11 (1963);
Huber, "Robust Estimation of a Location Parameter", Annals of Mathematical Statistics 35 (1964).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

STEP = 1e-4  # of log c in a difference; chosen: far above rounding, far below what fits resolve
MAX_DAMPING = 1e12  # beyond this no step helps
MAX_STEPS = 200  # chosen; fits of ten constants settle within thirty


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """A constant to be found.

    Attributes:
        name: For messages and reports.
        start: First guess; it stays where no sample depends on it.
        low: Smallest value that has a physical meaning, above 0.
        high: Largest.

    """

    name: str
    start: float
    low: float
    high: float

    def __post_init__(self) -> None:
        """Refuse bounds that hold no value."""
        if not 0 < self.low <= self.start <= self.high < float("inf"):
            raise ValueError(
                f"{self.name}: {self.low} <= {self.start} <= {self.high} does not hold"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The constants found.

    Attributes:
        values: In the order of the unknowns.
        spread: Standard error of each, relative; infinite where the samples do not tell.
        errors: Relative error of each sample, predicted over measured minus 1.

    """

    values: tuple[float, ...]
    spread: tuple[float, ...]
    errors: tuple[float, ...]

    @property
    def median_error(self) -> float:
        """Median of the samples' absolute relative errors."""
        return float(np.median(np.abs(self.errors)))


def fit(
    predict: Callable[[Vector], Vector],
    measured: Sequence[float] | Vector,
    unknowns: Sequence[Unknown],
    *,
    weights: Sequence[float] | Vector | None = None,
    huber: float = 0.1,
) -> Fit:
    """Find the constants under which `predict` comes nearest to what was measured.

    Args:
        predict: Constants to one positive prediction per sample.
        measured: Positive samples.
        unknowns: What to find, at least one.
        weights: Importance of each sample; equal where left out.
        huber: Relative error from which a sample counts as stray.

    Raises:
        ValueError: A measured or first predicted value is not positive and finite.

    """
    target = np.asarray(measured, dtype=np.float64)
    importance = np.ones_like(target) if weights is None else np.asarray(weights, dtype=np.float64)
    low = np.log([u.low for u in unknowns])
    high = np.log([u.high for u in unknowns])

    def residuals(log_values: Vector) -> Vector:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(np.log(predict(np.exp(log_values)) / target), dtype=np.float64)

    at = np.log([u.start for u in unknowns])
    if not np.isfinite(residuals(at)).all():
        raise ValueError("a fit needs positive, finite samples and predictions")
    at = _descend(residuals, at, (low, high), importance, huber)
    left = residuals(at)
    return Fit(
        values=tuple(float(v) for v in np.exp(at)),
        spread=_spread(_jacobian(residuals, at, high), left, importance),
        errors=tuple(float(e) for e in np.expm1(left)),
    )


def _descend(
    residuals: Callable[[Vector], Vector],
    at: Vector,
    bounds: tuple[Vector, Vector],
    importance: Vector,
    huber: float,
) -> Vector:
    low, high = bounds
    damping = 1e-3
    for _ in range(MAX_STEPS):
        here = residuals(at)
        slope = _jacobian(residuals, at, high)
        # Huber's loss as reweighted squares: a stray sample's weight falls with its error.
        pull = importance * huber / np.maximum(np.abs(here), huber)
        curvature = slope.T @ (pull[:, None] * slope)
        gradient = slope.T @ (pull * here)
        loss = _loss(here, importance, huber)
        while damping < MAX_DAMPING:
            ridge = damping * (np.diag(np.diag(curvature)) + 1e-12 * np.eye(at.size))
            moved = np.clip(at - np.linalg.solve(curvature + ridge, gradient), low, high)
            if _loss(residuals(moved), importance, huber) < loss:
                break
            damping *= 4
        else:
            return at
        settled = float(np.abs(moved - at).max()) < STEP / 10
        at, damping = moved, max(damping / 10, 1e-9)
        if settled:
            return at
    return at


def _loss(errors: Vector, importance: Vector, huber: float) -> float:
    size = np.abs(errors)
    small = size <= huber
    each = np.where(small, 0.5 * size**2, huber * (size - 0.5 * huber))
    total = float(importance @ each)
    return total if np.isfinite(total) else float("inf")


def _jacobian(residuals: Callable[[Vector], Vector], at: Vector, high: Vector) -> Vector:
    columns = []
    here = residuals(at)
    for i in range(at.size):
        step = STEP if at[i] + STEP <= high[i] else -STEP
        moved = at.copy()
        moved[i] += step
        columns.append((residuals(moved) - here) / step)
    return np.stack(columns, axis=1)


def _spread(slope: Vector, errors: Vector, importance: Vector) -> tuple[float, ...]:
    samples, unknowns = slope.shape
    variance = (
        float(importance @ errors**2) / importance.sum() * samples / max(samples - unknowns, 1)
    )
    curvature = slope.T @ (importance[:, None] * slope) / importance.mean()
    told = np.diag(curvature) > 1e-12  # noqa: PLR2004 (rounding: no sample moves with it)
    spread = np.full(unknowns, np.inf)
    if told.any():
        inverse = np.linalg.pinv(curvature[np.ix_(told, told)])
        spread[told] = np.sqrt(np.maximum(np.diag(inverse), 0.0) * variance)
    return tuple(float(s) for s in spread)
