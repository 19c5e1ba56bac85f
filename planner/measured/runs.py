"""What was measured, beside what was predicted: run folders and tables of measured runs.

A run folder is what `planner apply` wrote and its `train.py` ran in: `plan.json` and
`measured.jsonl`, one JSON object per optimizer step with `step` and `step_seconds`. The first steps
warm caches and allocators up and are left out; the median of the others is the measurement.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median, quantiles

from costmodels.profiles.reader import read_profile
from planner.files import read_text
from planner.measured.columns import Row
from planner.measured.errors import throughput_ratio
from planner.measured.rows import PROFILES
from planner.plan import read_plan
from planner.report import layout_words

PLAN_FILE = "plan.json"
MEASURED_FILE = "measured.jsonl"
UNFINISHED_FILE = MEASURED_FILE + ".part"  # what a run that died leaves behind
WARM_UP_STEPS = 2  # chosen: the first step allocates, the second may still compile or grow caches


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """One run of a plan.

    Attributes:
        label: Layout in short words.
        predicted: Seconds of a step by the plan's estimate.
        measured: Median seconds of a step.
        spread: Quartiles of the measured steps, low and high.
        num_steps: Steps that count.

    """

    label: str
    predicted: float
    measured: float
    spread: tuple[float, float]
    num_steps: int

    @property
    def error(self) -> float:
        """Predicted over measured, minus one."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow:
    """One row of a table of measured runs, with its prediction.

    Attributes:
        family: Runs of one campaign.
        measured: Tokens/s of one GPU (or steps/s where only the step time is stated).
        ratio: Predicted over measured speed.

    """

    family: str
    measured: float
    ratio: float


def read_run(folder: Path) -> MeasuredRun:
    """Read a run folder.

    Raises:
        ValueError: A file is missing or malformed, the plan has no predicted time, or no step is
            left after the warm-up; the message names the file.

    """
    plan = read_plan(folder / PLAN_FILE)
    path = folder / MEASURED_FILE
    if not path.exists() and (folder / UNFINISHED_FILE).exists():
        raise ValueError(f"the run in {folder} has not finished: it left only {UNFINISHED_FILE}")
    steps = list(_step_seconds(path))
    counted = steps[WARM_UP_STEPS:]
    if not counted:
        raise ValueError(
            f"{path} holds {len(steps)} steps; the first {WARM_UP_STEPS} are warm-up, so at least "
            f"{WARM_UP_STEPS + 1} are needed"
        )
    time = plan.estimate.get("time")
    predicted = time.get("step_seconds") if isinstance(time, dict) else None
    if not _is_positive(predicted):
        raise ValueError(f"{folder / PLAN_FILE} has no estimate.time.step_seconds")
    quarters = quantiles(counted, n=4) if len(counted) > 1 else counted * 3
    return MeasuredRun(
        label=layout_words(plan.layout),
        predicted=float(str(predicted)),
        measured=median(counted),
        spread=(quarters[0], quarters[2]),
        num_steps=len(counted),
    )


def _step_seconds(path: Path) -> Iterable[float]:
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path} line {number} is no JSON object: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(  # noqa: TRY004 - a fault of the file, as any other
                f"{path} line {number} is no JSON object: {line[:40]}"
            )
        if "step_seconds" not in record:
            continue  # lines about the run as a whole
        if "step" in record and type(record["step"]) is not int:
            raise ValueError(f"{path} line {number}: step is {record['step']!r}")
        if not _is_positive(record["step_seconds"]):
            raise ValueError(f"{path} line {number}: step_seconds is {record['step_seconds']!r}")
        yield float(record["step_seconds"])


def _is_positive(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(float(str(value))) and float(str(value)) > 0


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Kendall's tau-a of pairs: 1 when both orders agree, -1 when they are opposite.

    Source: Kendall, "A New Measure of Rank Correlation", Biometrika 30, 1938. Pairs that tie count
    as neither.
    """
    signs = [_sign(a[0] - b[0]) * _sign(a[1] - b[1]) for a, b in combinations(pairs, 2)]
    return sum(signs) / len(signs) if signs else 1.0


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def rows_by_generation(rows: Sequence[Row]) -> dict[str, list[MeasuredRow]]:
    """Sort predicted rows of a table by GPU generation; only scored rows with both speeds stay.

    Args:
        rows: Rows with their predicted columns (see `planner.measured.validate`).

    """
    groups: dict[str, list[MeasuredRow]] = {}
    for row in rows:
        ratio, measured = throughput_ratio(row), _speed(row)
        counts = row.get("core", "1") == "1" and row.get("status", "ok") == "ok"
        if ratio is None or measured is None or not counts:
            continue
        groups.setdefault(generation_of(row.get("gpu", "")), []).append(
            MeasuredRow(family=row.get("family") or "all runs", measured=measured, ratio=ratio)
        )
    return dict(sorted(groups.items()))


def generation_of(gpu: str) -> str:
    """Return the GPU generation that a table's `gpu` value belongs to."""
    return read_profile(PROFILES[gpu]).generation if gpu in PROFILES else gpu or "unknown"


def _speed(row: Mapping[str, str]) -> float | None:
    for column, invert in (("tokens_per_sec_per_gpu", False), ("step_seconds", True)):
        try:
            value = float(row.get(column) or 0)
        except ValueError:
            continue
        if value > 0:
            return 1 / value if invert else value
    return None
