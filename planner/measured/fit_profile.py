"""`planner calibrate --from CSV`: a machine's own constants from its measured runs.

Only constants that fits know move, between their bounds: those that bear on the machine's
generation, also where it chose one by hand, and that some run tells about. A run faster
than the machine's peak allows is refused by name: it is another machine, or another unit. Runs
that the fit cannot reach are named, since they often differ in something that the table leaves out.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from costmodels.hardware import Calibration, HardwareProfile, Provenance
from costmodels.parameters import model_flops_per_token
from planner.measured.columns import Row
from planner.measured.fit import Fitted, Sample, fit_constants, read_samples
from planner.measured.fit_parameters import FOLLOWERS, fitted_parameters

OUTLYING = 3.0  # chosen: robust standard deviations beyond which a run is an outlier
LEAST_SPREAD = 0.02  # runs within 2 % repeat each other: the noise of identical repeats
MAD_TO_SIGMA = 1.4826  # of a normal distribution
FEWEST_RUNS = 3  # chosen: below that a fit is a copy of the runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlier:
    """A run that the fitted constants do not reach.

    Attributes:
        error: predicted / measured - 1.

    """

    run: str
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedProfile:
    """A profile with constants of its own, and how well they do.

    Attributes:
        mean_error: Mean absolute relative error of tokens/s over the runs, after the fit.
        error_before: The same with the generation's constants.

    """

    profile: HardwareProfile
    num_runs: int
    mean_error: float
    error_before: float
    outliers: tuple[Outlier, ...]


def fit_profile(
    rows: Sequence[Row], progress: Callable[[str], None] = lambda _: None
) -> FittedProfile:
    """Fit the constants of one machine to its runs.

    Raises:
        ValueError: The rows are of several machines, too few, or faster than the machine's peak.

    """
    samples = read_samples(rows)
    names = sorted({sample.asked.cluster.profile.name for sample in samples})
    if len(names) > 1:
        raise ValueError(f"one machine at a time: the rows are of {', '.join(names)}")
    if len(samples) < FEWEST_RUNS:
        raise ValueError(
            f"{len(samples)} completed runs with a measured speed; a fit takes {FEWEST_RUNS}"
        )
    for sample in samples:
        _refuse_above_peak(sample, _name(rows, sample))
    profile = samples[0].asked.cluster.profile
    every = fitted_parameters([profile.generation], own_machine=True)
    start = fit_constants(samples, every, rounds=0)
    # The pull would carry what no run tells to the middle of its bounds; it stays as it is.
    parameters = tuple(one for j, one in enumerate(every) if start.slopes[:, j].any())
    fitted = fit_constants(samples, parameters, progress=progress)
    return FittedProfile(
        profile=_with_fitted(profile, fitted, len(samples)),
        num_runs=len(samples),
        mean_error=_mean_error(fitted),
        error_before=_mean_error(start),
        outliers=_outliers(rows, samples, fitted),
    )


def _refuse_above_peak(sample: Sample, name: str) -> None:
    model, job = sample.asked.model, sample.asked.job
    device = sample.asked.cluster.profile.device
    peak = max(value for _, value in device.peak_flops)
    # Half of the attention square: what a causal kernel can leave out.
    whole = model_flops_per_token(model, job.seq_len)
    least = whole - 0.5 * (whole - model_flops_per_token(model, 1))
    rate = sample.rate * least
    if rate > peak:
        raise ValueError(
            f"run {name} would take {rate / 1e12:.0f} TFLOP/s on each GPU; {device.name} peaks at "
            f"{peak / 1e12:.0f}: another machine or another unit"
        )


def _with_fitted(profile: HardwareProfile, fitted: Fitted, num_runs: int) -> HardwareProfile:
    constants = dict(profile.calibration.constants)
    sources = {source.key: source for source in profile.provenance}
    spread = _standard_errors(fitted)
    for parameter, log, sigma in zip(fitted.parameters, fitted.logs, spread, strict=True):
        factor = math.exp(log) / parameter.value
        for name in filter(None, (parameter.name, FOLLOWERS.get(parameter.name))):
            constants[name] *= factor
            key = f"constants.{name}"
            sources[key] = Provenance(
                key=key,
                kind="fitted",
                source=f"{num_runs} measured runs; 80 % interval in low and high",
                low=constants[name] * math.exp(-1.28 * sigma),
                high=constants[name] * math.exp(1.28 * sigma),
            )
    calibration = Calibration(constants=tuple(constants.items()))
    return replace(profile, calibration=calibration, provenance=tuple(sources.values()))


def _standard_errors(fitted: Fitted) -> list[float]:
    """Return standard errors of the constants' logarithms, the prior of their bounds included."""
    variance = max(_sigma(fitted), LEAST_SPREAD) ** 2
    prior = np.diag([1 / parameter.width**2 for parameter in fitted.parameters])
    precision = fitted.slopes.T @ fitted.slopes / variance + prior
    return [math.sqrt(value) for value in np.diag(np.linalg.inv(precision))]


def _sigma(fitted: Fitted) -> float:
    centre = np.median(fitted.errors)
    return MAD_TO_SIGMA * float(np.median(np.abs(fitted.errors - centre)))


def _mean_error(fitted: Fitted) -> float:
    return float(np.mean(np.abs(np.expm1(fitted.errors))))


def _outliers(
    rows: Sequence[Row], samples: Sequence[Sample], fitted: Fitted
) -> tuple[Outlier, ...]:
    limit = OUTLYING * max(_sigma(fitted), LEAST_SPREAD)
    found = [
        Outlier(run=_name(rows, sample), error=math.expm1(error))
        for sample, error in zip(samples, fitted.errors, strict=True)
        if abs(error) > limit
    ]
    return tuple(sorted(found, key=lambda outlier: (-abs(outlier.error), outlier.run)))


def _name(rows: Sequence[Row], sample: Sample) -> str:
    return rows[sample.row].get("id") or f"row {sample.row + 2}"
