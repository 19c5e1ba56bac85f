"""Fit the constants of device generations to measured runs, and test the fit on runs left out.

What is fitted stands in `hardware_profiles/generations`: every constant of kind "fitted", between
its own bounds. Nothing belongs to a source, a family, a release or a model. What is made small
stands in `fit_loss`; beside it, a weak pull of each constant to the geometric middle of its bounds
alone decides where no run tells anything:

    loss(c) = loss of the runs + PULL / 2 * mean over constants of ((ln c - middle) / width)^2

Steps are Gauss-Newton's in ln c, reweighted for Huber's loss. Leaving a group out moves the
constants from the joint optimum by the same derivatives without the group's rows: one linear
least-squares problem per group, then the group is predicted exactly. Constants that were chosen
do not move then: two of A100's (`gemm_efficiency`, `tail_share`) were set by hand on all its runs,
so that no run of an A100 is left out of these.

Source: Huber, Annals of Mathematical Statistics 35 (1964); Holland and Welsch, "Robust regression
using iteratively reweighted least-squares", Communications in Statistics A6 (1977).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from costmodels.hardware import Calibration, Cluster
from costmodels.layout import Layout
from costmodels.terms import TimeEstimate
from costmodels.time.estimate import estimate_time
from planner.codec import rounded
from planner.measured.columns import Row, UnsupportedRowError
from planner.measured.errors import measured_rate, scored
from planner.measured.fit_loss import family_weights, loss_terms
from planner.measured.fit_parameters import FOLLOWERS, Parameter, fitted_parameters, takes_from
from planner.measured.robust_step import solve
from planner.measured.rows import MeasuredJob, interpret
from planner.measured.validate import PREDICTED, best_reading

Array = NDArray[np.float64]

STEP = 0.02  # of ln c in a difference; chosen: above the kinks of ceil and max
ROUNDS = 3  # chosen: later ones move no constant by more than its uncertainty


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A completed run with its reading and what it measured.

    Attributes:
        row: Its place in the table.
        family: Runs of one campaign; unit of weighting.
        grid: Runs that differ in the layout only, of one campaign and software; "" for none.
        rate: Measured tokens per second and GPU.

    """

    row: int
    asked: MeasuredJob
    layout: Layout
    family: str
    grid: str
    rate: float

    @property
    def generation(self) -> str:
        """Whose constants the run tells about."""
        return self.asked.cluster.profile.generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Constants at the optimum, with what a refit needs.

    Attributes:
        logs: Natural logarithms of the parameters.
        errors: log(predicted / measured) of each sample.
        slopes: Derivatives of the errors, one row per sample.

    """

    parameters: tuple[Parameter, ...]
    logs: Array
    errors: Array
    slopes: Array


def read_samples(rows: Sequence[Row]) -> tuple[Sample, ...]:
    """Return the completed, scored runs of a table that the planner can express."""
    samples = []
    for number, row in enumerate(rows):
        rate = measured_rate(row)
        if rate is None or not scored(row):
            continue
        try:
            asked = interpret(row)
        except UnsupportedRowError:
            continue
        best = best_reading(asked)
        if best.time is not None:
            samples.append(
                Sample(
                    row=number,
                    asked=asked,
                    layout=best.layout,
                    family=row.get("family", ""),
                    grid=row.get("grid", "") if row.get("grid_quality") == "clean" else "",
                    rate=rate,
                )
            )
    return tuple(samples)


def estimate_with(sample: Sample, parameters: Sequence[Parameter], logs: Array) -> TimeEstimate:
    """Predict a run under other constants."""
    cluster = _with_constants(sample.asked.cluster, parameters, logs)
    return estimate_time(sample.asked.model, sample.asked.job, cluster, sample.layout)


def _with_constants(cluster: Cluster, parameters: Sequence[Parameter], logs: Array) -> Cluster:
    profile = cluster.profile
    constants = dict(profile.calibration.constants)
    for parameter, log in zip(parameters, logs, strict=True):
        if not takes_from(profile.generation, parameter.generation, parameter.name):
            continue
        factor = math.exp(log) / parameter.value
        for name in (parameter.name, FOLLOWERS.get(parameter.name)):
            if name is not None:
                constants[name] *= factor
    calibration = Calibration(constants=tuple(constants.items()))
    return replace(cluster, profile=replace(profile, calibration=calibration))


def fit_constants(
    samples: Sequence[Sample],
    parameters: Sequence[Parameter],
    *,
    rounds: int = ROUNDS,
    progress: Callable[[str], None] = lambda _: None,
) -> Fitted:
    """Find the constants under which the samples are predicted best.

    Args:
        samples: Measured runs, at least one.
        parameters: What to find; the search starts at their values.
        rounds: Gauss-Newton steps with fresh derivatives; 0 only evaluates where they stand.
        progress: Told the loss of each round.

    """
    logs = np.log([p.value for p in parameters])
    weights = family_weights(samples)
    errors = _errors(samples, parameters, logs)
    slopes = _slopes(samples, parameters, logs, errors)
    for turn in range(rounds):
        logs = solve(parameters, logs, *loss_terms(samples, errors, slopes))
        errors = _errors(samples, parameters, logs)
        slopes = _slopes(samples, parameters, logs, errors)
        progress(f"round {turn + 1}: mean error {float(weights @ np.abs(np.expm1(errors))):.1%}")
    return Fitted(parameters=tuple(parameters), logs=logs, errors=errors, slopes=slopes)


def _errors(samples: Sequence[Sample], parameters: Sequence[Parameter], logs: Array) -> Array:
    predicted = [
        estimate_with(sample, parameters, logs).tokens_per_second_per_gpu for sample in samples
    ]
    return np.log(np.array(predicted) / [sample.rate for sample in samples])


def _slopes(
    samples: Sequence[Sample], parameters: Sequence[Parameter], logs: Array, errors: Array
) -> Array:
    slopes = np.zeros((len(samples), len(parameters)))
    for j, parameter in enumerate(parameters):
        moved = logs.copy()
        moved[j] += STEP if logs[j] + STEP <= math.log(parameter.high) else -STEP
        file, name = parameter.generation, parameter.name
        rows = [i for i, s in enumerate(samples) if takes_from(s.generation, file, name)]
        there = _errors([samples[i] for i in rows], parameters, moved)
        slopes[rows, j] = (there - errors[rows]) / (moved[j] - logs[j])
    return slopes


def predict_left_out(
    rows: Sequence[Row], by: str, *, progress: Callable[[str], None] = lambda _: None
) -> list[dict[str, str]]:
    """Refit without each group of rows, predict the group, and add columns `leave_out_...`.

    Args:
        rows: Rows with their predicted columns.
        by: "family" (all families of one source and framework leave together) or "gpu".
        progress: Told what is going on.

    """
    samples = read_samples(rows)
    parameters = fitted_parameters(sorted({sample.generation for sample in samples}))
    progress(f"{len(samples)} completed runs, {len(parameters)} constants")
    joint = fit_constants(samples, parameters, rounds=0)
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for place, sample in enumerate(samples):
        groups[group_of(rows[sample.row], by)].append(place)
    done = [{**row, **{f"leave_out_{name}": row[name] for name in PREDICTED}} for row in rows]
    for members in groups.values():
        kept = np.setdiff1d(np.arange(len(samples)), members)
        others = [samples[place] for place in kept]
        terms = loss_terms(others, joint.errors[kept], joint.slopes[kept])
        logs = solve(parameters, joint.logs, *terms)
        for place in members:
            time = estimate_with(samples[place], parameters, logs)
            figures = (time.step_seconds, time.tokens_per_second_per_gpu)
            names = ("step_seconds", "tokens_per_second_per_gpu")
            for name, figure in zip(names, figures, strict=True):
                done[samples[place].row][f"leave_out_predicted_{name}"] = repr(rounded(figure))
    progress(f"{len(groups)} groups left out by {by}: {_left_out_line(samples, done)}")
    return done


def group_of(row: Row, by: str) -> tuple[str, ...]:
    """Return which rows leave together."""
    return (row["gpu"],) if by == "gpu" else (row.get("source", ""), row["framework"])


def _left_out_line(samples: Sequence[Sample], done: Sequence[Row]) -> str:
    """Return the mean over families of the error of runs that were not fitted."""
    weights = family_weights(samples)
    column = "leave_out_predicted_tokens_per_second_per_gpu"
    ratios = np.array([float(done[s.row][column]) / s.rate for s in samples])
    errors = np.abs(ratios - 1)
    return f"throughput {float(weights @ errors):.1%}, median row {float(np.median(errors)):.1%}"
