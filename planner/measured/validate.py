"""Predict every row of a table of measured runs (`planner.measured.errors` says how far off).

Predictions depend on a row's description only. A row that cannot be expressed is called
"unsupported" with the reason; it is never dropped.
"""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from costmodels.units import GIB
from planner.codec import rounded
from planner.files import read_text
from planner.judge import Judgement, Verdict, judge
from planner.measured.columns import Row
from planner.measured.rows import MeasuredJob, interpret

PREDICTED = (
    "predicted_verdict",
    "predicted_step_seconds",
    "predicted_tokens_per_second_per_gpu",
    "predicted_allocated_gib",
    "predicted_reserved_gib",
    "predicted_note",
)
UNSUPPORTED = "unsupported"

# Columns that `interpret` reads; a table without one of them is another kind of table.
REQUIRED = (
    "gpu",
    "gpus",
    "gpus_per_node",
    "inter_node_gbps_per_gpu",
    "model",
    "params_b",
    "hidden",
    "layers",
    "heads",
    "kv_heads",
    "head_dim",
    "ffn_hidden",
    "ffn_type",
    "vocab",
    "seq_len",
    "experts",
    "top_k",
    "moe_ffn_hidden",
    "shared_experts",
    "dense_layers",
    "tied_embeddings",
    "attention",
    "flash",
    "precision",
    "dp",
    "tp",
    "sp",
    "pp",
    "vpp",
    "cp",
    "ep",
    "etp",
    "zero",
    "micro_batch",
    "global_batch",
    "grad_accum",
    "recompute",
    "recompute_modules",
    "schedule",
    "compile",
    "switches",
    "framework",
)


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read a measurements CSV.

    Raises:
        ValueError: The file cannot be read, lacks columns or has ragged rows.

    """
    text = read_text(path).removeprefix("\ufeff")  # spreadsheets mark UTF-8 so
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        rows = list(reader)
    except csv.Error as error:
        raise ValueError(f"{path} is no CSV: {error}") from error
    names = reader.fieldnames or ()
    twice = [name for name in names if names.count(name) > 1]
    if twice:  # rows are read by name: one of the two would be lost
        raise ValueError(f"{path} has the column {twice[0]!r} twice")
    missing = [name for name in REQUIRED if name not in names]
    if missing:
        raise ValueError(f"{path} lacks the column {missing[0]!r} ({len(missing)} missing in all)")
    for number, row in enumerate(rows, start=2):
        if None in row or None in row.values():
            raise ValueError(f"{path} line {number} has another number of cells than the header")
    return rows


def predict(row: Row) -> dict[str, str]:
    """Return the predicted columns of one row, as text."""
    try:
        asked = interpret(row)
    except ValueError as error:  # unsupported, or sizes that a record refuses
        return _columns(UNSUPPORTED, note=str(error))
    best = best_reading(asked)
    if best.memory is None or best.time is None:
        reasons = "; ".join(violation.message for violation in best.violations)
        return _columns(best.verdict.value, note=reasons)
    return _columns(
        best.verdict.value,
        best.time.step_seconds,
        best.time.tokens_per_second_per_gpu,
        best.memory.parts.allocated / GIB,
        best.memory.parts.reserved / GIB,
        note=asked.note,
    )


def predict_all(
    rows: Sequence[Row], progress: Callable[[int], None] = lambda _: None
) -> list[dict[str, str]]:
    """Return the rows with their predicted columns added, in order."""
    done = []
    for number, row in enumerate(rows, start=1):
        done.append({**row, **predict(row)})
        progress(number)
    return done


def best_reading(asked: MeasuredJob) -> Judgement:
    """Among the layouts a row may mean: the least recomputation that fits, then the fastest."""
    judged = [judge(asked.model, asked.job, asked.cluster, layout) for layout in asked.layouts]
    for wanted in (Verdict.FITS, Verdict.AT_RISK, Verdict.DOES_NOT_FIT):
        candidates = [j for j in judged if j.verdict is wanted and j.time is not None]
        if candidates:
            first = candidates[0].layout.recompute
            same = [j for j in candidates if j.layout.recompute is first]
            return min(same, key=_seconds)
    return judged[0]


def _seconds(judgement: Judgement) -> float:
    assert judgement.time is not None
    return judgement.time.step_seconds


def _columns(verdict: str, *figures: float, note: str) -> dict[str, str]:
    texts = [repr(rounded(figure)) for figure in figures]
    padded = texts + [""] * (4 - len(texts))
    return dict(zip(PREDICTED, (verdict, *padded, note), strict=True))


def csv_text(rows: Iterable[Row]) -> str:
    """Return rows as CSV text."""
    rows = list(rows)
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
