"""Errors of predicted rows: per family, over all, and of the verdicts."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from planner.judge import Verdict
from planner.measured.columns import Row
from planner.measured.validate import UNSUPPORTED


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyError:
    """How far predictions of one family are off.

    Attributes:
        throughput: Mean absolute relative error of tokens/s, None where nothing was measured.
        bias: Geometric mean of predicted over measured, minus 1.
        memory: Mean absolute relative error of memory.

    """

    family: str
    num_rows: int
    throughput: float | None
    bias: float | None
    memory: float | None


def family_errors(rows: Sequence[Row]) -> list[FamilyError]:
    """Return the errors per family over completed core rows, worst throughput first."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if scored(row):
            groups[row.get("family", "all")].append(row)
    found = [_family_error(name, members) for name, members in groups.items()]
    return sorted(found, key=lambda error: (-(error.throughput or 0.0), error.family))


def _family_error(family: str, rows: Sequence[Row]) -> FamilyError:
    ratios = [ratio for row in rows if (ratio := throughput_ratio(row)) is not None]
    memory = [ratio for row in rows if (ratio := memory_ratio(row)) is not None]
    logs = [math.log(ratio) for ratio in ratios]
    return FamilyError(
        family=family,
        num_rows=len(rows),
        throughput=_mean([abs(ratio - 1) for ratio in ratios]),
        bias=math.exp(sum(logs) / len(logs)) - 1 if logs else None,
        memory=_mean([abs(ratio - 1) for ratio in memory]),
    )


def measured_rate(row: Row) -> float | None:
    """Return measured tokens/s/GPU, from the step time where only that stands."""
    rate = _number(row, "tokens_per_sec_per_gpu")
    parts = [_number(row, name) for name in ("global_batch", "seq_len", "step_seconds", "gpus")]
    if rate is None and all(parts):
        batch, length, seconds, gpus = (part or math.nan for part in parts)
        rate = batch * length / seconds / gpus
    return rate


def throughput_ratio(row: Row) -> float | None:
    """Return predicted over measured tokens/s/GPU, None where either is missing."""
    predicted = _number(row, "predicted_tokens_per_second_per_gpu")
    measured = _number(row, "tokens_per_sec_per_gpu")
    step, predicted_step = _number(row, "step_seconds"), _number(row, "predicted_step_seconds")
    if predicted and measured:
        return predicted / measured
    return step / predicted_step if step and predicted_step else None


def memory_ratio(row: Row) -> float | None:
    """Return predicted over measured memory, on the basis that the row states."""
    measured = _number(row, "memory_gib")
    allocated = _number(row, "predicted_allocated_gib")
    reserved = _number(row, "predicted_reserved_gib")
    if not (measured and allocated and reserved):
        return None
    if row.get("memory_basis") == "allocated":
        return allocated / measured
    if row.get("memory_basis") == "either":
        return min((allocated, reserved), key=lambda value: abs(value - measured)) / measured
    return reserved / measured


def error_table(rows: Sequence[Row], worst: int | None = None) -> str:
    """Return the table that `planner validate` prints: families, worst first, then totals.

    Args:
        rows: Rows with their predicted columns.
        worst: Families to list; all by default. Totals are always over all of them.

    """
    errors = family_errors(rows)
    lines = [f"{'family':<32} {'rows':>5} {'throughput':>10} {'bias':>8} {'memory':>8}"]
    lines += [
        f"{error.family[:32]:<32} {error.num_rows:>5} {_percent(error.throughput):>10} "
        f"{_percent(error.bias, sign=True):>8} {_percent(error.memory):>8}"
        for error in errors[:worst]
    ]
    throughput = [error.throughput for error in errors if error.throughput is not None]
    memory = [error.memory for error in errors if error.memory is not None]
    ratios = [ratio for row in rows if scored(row) and (ratio := throughput_ratio(row))]
    lines.append(
        f"mean over families: throughput {_percent(_mean(throughput))}, "
        f"memory {_percent(_mean(memory))}"
    )
    if ratios:
        middle = median(abs(ratio - 1) for ratio in ratios)
        lines.append(f"median row: throughput {_percent(middle)}")
    lines.append(_verdict_line(rows))
    return "\n".join(lines)


def _verdict_line(rows: Sequence[Row]) -> str:
    core = [row for row in rows if row.get("core", "1") == "1"]
    died = [row for row in core if row.get("status") == "oom"]
    ran = [row for row in core if row.get("status") == "ok"]
    refused = {Verdict.DOES_NOT_FIT.value, Verdict.ILLEGAL.value, UNSUPPORTED}
    caught = sum(row["predicted_verdict"] == Verdict.DOES_NOT_FIT.value for row in died)
    wrong = sum(row["predicted_verdict"] in refused for row in ran)
    return (
        f"out-of-memory runs refused: {caught} of {len(died)}; "
        f"completed runs refused: {wrong} of {len(ran)}"
    )


def scored(row: Row) -> bool:
    """Return whether a row is a completed run that counts."""
    return row.get("core", "1") == "1" and row.get("status", "ok") == "ok"


def _number(row: Row, column: str) -> float | None:
    try:
        return float(row.get(column) or "nan") if row.get(column) else None
    except ValueError:
        return None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _percent(value: float | None, *, sign: bool = False) -> str:
    if value is None:
        return "-"
    return f"{100 * value:+.1f} %" if sign else f"{100 * value:.1f} %"
