"""Measured sweeps: many layouts of one job on one machine, as a JSON file of rows.

`examples/compare` writes them: model, job and the calibrated machine whole, and the seconds of
every step of every layout. Predictions are made anew when a file is read, so that a figure shows
what the cost model says today; only where the measurement rests on the prediction itself (sleeps
of the predicted length) the one that was slept is in the row.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median, quantiles

from costmodels.hardware import Calibration, Cluster
from costmodels.job import TrainingJob
from costmodels.layout import Layout
from costmodels.model import ModelSpec
from costmodels.profiles.reader import generation_constants
from costmodels.time.estimate import estimate_time
from planner.codec import DecodeError, decode, encode
from planner.files import read_json, write_text
from planner.measured.runs import MeasuredRun
from planner.report import layout_words

SCHEMA, KIND = 1, "sweep"
FEWEST_STEPS = 2  # a spread needs two
CLEAR = 2.0  # times the spread: pairs closer than that have no order to predict


@dataclass(frozen=True, slots=True, kw_only=True)
class SweptLayout:
    """One layout of a sweep.

    Attributes:
        step_seconds: Of every step that counts, in order.
        slept_for: The step time whose sleeps were measured; None where work was real.

    """

    layout: Layout
    step_seconds: tuple[float, ...]
    slept_for: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What was measured in one go.

    Attributes:
        command: Makes the file anew.
        conditions: What else is to know: load of the machine, rounds, versions.

    """

    command: str
    conditions: str
    model: ModelSpec
    job: TrainingJob
    cluster: Cluster
    layouts: tuple[SweptLayout, ...]


def write_sweep(sweep: Sweep, path: Path) -> None:
    """Write a sweep atomically; ValueError names the file where that fails."""
    document = {"schema": SCHEMA, "kind": KIND, "sweep": encode(sweep)}
    write_text(path, json.dumps(document, sort_keys=True, indent=1) + "\n")


def is_sweep(document: object) -> bool:
    """Return whether a JSON document says that it is a sweep."""
    return isinstance(document, dict) and document.get("kind") == KIND


def read_sweep(path: Path) -> Sweep:
    """Read a sweep.

    Raises:
        ValueError: The file is no sweep, one of another schema, or a layout has too few steps or
            times that are not positive; the message names the file and the place in it.

    """
    document = read_json(path)
    if not isinstance(document, dict) or not is_sweep(document):
        raise ValueError(f"{path} is no measured sweep (examples/compare writes them)")
    if document.get("schema") != SCHEMA:
        raise ValueError(
            f"{path} has sweep schema {document.get('schema')!r}; this version reads {SCHEMA}"
        )
    try:
        sweep = decode(Sweep, document.get("sweep"), "sweep")
    except DecodeError as error:
        raise ValueError(f"{path} is not a valid sweep: {error}") from error
    for number, swept in enumerate(sweep.layouts):
        seconds = swept.step_seconds
        if len(seconds) < FEWEST_STEPS or min(seconds) <= 0:
            raise ValueError(
                f"{path}: sweep.layouts[{number}].step_seconds must hold at least {FEWEST_STEPS} "
                f"positive numbers, not {list(seconds)}"
            )
    return sweep


def runs_of(sweep: Sweep) -> list[MeasuredRun]:
    """Return a sweep's layouts with their predictions.

    Raises:
        ValueError: The cost model cannot price a layout.

    """
    cluster, runs = _completed(sweep.cluster), []
    for swept in sweep.layouts:
        predicted = swept.slept_for
        if predicted is None:
            time = estimate_time(sweep.model, sweep.job, cluster, swept.layout)
            predicted = time.step_seconds
        low, _, high = quantiles(swept.step_seconds, n=4, method="inclusive")
        ranks = swept.layout.num_gpus
        asleep = "" if swept.slept_for is None else f"  ({ranks} ranks, slept)"
        runs.append(
            MeasuredRun(
                label=layout_words(swept.layout) + asleep,
                predicted=predicted,
                measured=median(swept.step_seconds),
                spread=(low, high),
                num_steps=len(swept.step_seconds),
            )
        )
    return runs


def _completed(cluster: Cluster) -> Cluster:
    """Return the machine with what its generation says of constants that are newer than the rows.

    As reading its TOML anew would: a constant that calibration does not measure is not in the rows.
    """
    profile = cluster.profile
    stated = generation_constants(profile.generation).items()
    values = {name: float(str(entry.value)) for name, entry in stated}
    known = Calibration(constants=tuple({**values, **dict(profile.calibration.constants)}.items()))
    return replace(cluster, profile=replace(profile, calibration=known))


def clear_order(runs: Sequence[MeasuredRun]) -> tuple[float, int]:
    """Return Kendall's tau over the pairs that differ clearly, and how many those are.

    A pair differs clearly if its medians are further apart than twice the larger spread (the
    distance between the quartiles) of the two.
    """
    agreed = count = 0
    for one, other in combinations(runs, 2):
        apart = one.measured - other.measured
        spread = max(run.spread[1] - run.spread[0] for run in (one, other))
        if abs(apart) <= CLEAR * spread:
            continue
        count += 1
        agreed += 1 if apart * (one.predicted - other.predicted) > 0 else -1
    return (agreed / count if count else 1.0), count
