"""Predictions depend on a row's description and on nothing else."""

import csv
import io
import random
from pathlib import Path

import pytest

from planner.measured.errors import error_table, family_errors, memory_ratio, throughput_ratio
from planner.measured.validate import PREDICTED, csv_text, predict, predict_all, read_rows

RUNS = Path(__file__).parents[2] / "golden" / "measured_runs.csv"
EVERY = 40  # one row in so many: each kind of run is among them

UNSEEN = (
    "id",
    "family",
    "grid",
    "source",
    "source_ref",
    "release",
    "status",
    "step_seconds",
    "tokens_per_sec_per_gpu",
    "memory_gib",
)


@pytest.fixture(scope="module")
def rows():
    return read_rows(RUNS)[::EVERY]


@pytest.fixture(scope="module")
def predicted(rows):
    return predict_all(rows)


def columns(row):
    return {name: row[name] for name in PREDICTED}


def test_rows_keep_their_order_and_columns(rows, predicted):
    assert [row["id"] for row in predicted] == [row["id"] for row in rows]
    assert all(set(row) == set(rows[0]) | set(PREDICTED) for row in predicted)


def test_every_row_gets_a_verdict_and_figures_follow_it(predicted):
    for row in predicted:
        has_figures = row["predicted_verdict"] in ("fits", "at_risk", "does_not_fit")
        assert bool(row["predicted_step_seconds"]) == has_figures, row["id"]
        assert bool(row["predicted_reserved_gib"]) == has_figures, row["id"]


def test_blank_and_shuffled_columns_that_are_not_description_change_nothing(rows, predicted):
    blanked = [{**row, **dict.fromkeys(UNSEEN, "")} for row in rows]
    order = list(range(len(rows)))
    random.Random(7).shuffle(order)  # noqa: S311  # an order, not a secret
    again = predict_all([blanked[place] for place in order])
    for place, row in zip(order, again, strict=True):
        assert columns(row) == columns(predicted[place])


def test_a_row_that_cannot_be_expressed_is_kept_with_its_reason(rows):
    answer = predict({**rows[0], "attention": "hybrid-mamba2"})
    assert answer["predicted_verdict"] == "unsupported"
    assert "hybrid-mamba2" in answer["predicted_note"]
    assert answer["predicted_step_seconds"] == ""


def test_an_illegal_layout_names_the_rule_in_its_note(rows):
    row = next(r for r in rows if int(r["heads"]) % 7)
    answer = predict({**row, "tp": "7", "dp": "1", "pp": "1", "gpus": "7", "global_batch": "64"})
    assert answer["predicted_verdict"] in ("illegal", "unsupported")
    assert answer["predicted_note"]


def test_step_and_rate_agree(predicted):
    for row in predicted:
        if row["predicted_step_seconds"] and row["global_batch"]:
            tokens = int(row["seq_len"]) * int(row["global_batch"]) / int(row["gpus"])
            rate = tokens / float(row["predicted_step_seconds"])
            assert float(row["predicted_tokens_per_second_per_gpu"]) == pytest.approx(rate)


def test_the_csv_that_is_written_reads_back(predicted):
    assert list(csv.DictReader(io.StringIO(csv_text(predicted)))) == predicted


def test_ratios_take_the_basis_that_the_row_states():
    row = {
        "memory_gib": "10",
        "predicted_allocated_gib": "9",
        "predicted_reserved_gib": "12",
        "tokens_per_sec_per_gpu": "100",
        "predicted_tokens_per_second_per_gpu": "110",
        "step_seconds": "",
        "predicted_step_seconds": "1",
    }
    assert throughput_ratio(row) == pytest.approx(1.1)
    assert memory_ratio({**row, "memory_basis": "allocated"}) == pytest.approx(0.9)
    assert memory_ratio({**row, "memory_basis": "reserved"}) == pytest.approx(1.2)
    assert memory_ratio({**row, "memory_basis": "either"}) == pytest.approx(0.9)
    assert memory_ratio({**row, "memory_basis": "allocated", "memory_gib": ""}) is None


def test_families_are_listed_worst_first_with_their_bias():
    base = {"core": "1", "status": "ok", "predicted_step_seconds": "1", "step_seconds": ""}

    def row(family, measured, guess):
        return {
            **base,
            "family": family,
            "tokens_per_sec_per_gpu": str(measured),
            "predicted_tokens_per_second_per_gpu": str(guess),
            "predicted_verdict": "fits",
        }

    errors = family_errors([row("near", 100, 101), row("far", 100, 150), row("far", 100, 130)])
    assert [error.family for error in errors] == ["far", "near"]
    assert errors[0].throughput == pytest.approx(0.4)
    assert errors[0].bias == pytest.approx((1.5 * 1.3) ** 0.5 - 1)


def test_the_table_counts_refusals(predicted):
    last = error_table(predicted).splitlines()[-1]
    died = sum(row["status"] == "oom" for row in predicted)
    ran = sum(row["status"] == "ok" for row in predicted)
    assert f"of {died};" in last
    assert last.endswith(f"of {ran}")


@pytest.mark.parametrize(
    ("text", "word"),
    [("", "lacks"), ("a,b\n1,2\n", "lacks the column"), ("a\x00b", "")],
)
def test_tables_of_another_kind_are_refused_by_name(tmp_path, text, word):
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"table\.csv") as caught:
        read_rows(path)
    assert word in str(caught.value)


def test_ragged_rows_are_refused_with_their_line(tmp_path):
    lines = RUNS.read_text().splitlines()[:3]
    path = tmp_path / "table.csv"
    path.write_text("\n".join([*lines, "only,two"]))
    with pytest.raises(ValueError, match="line 4"):
        read_rows(path)


def test_a_table_from_a_spreadsheet_is_read(tmp_path):
    path = tmp_path / "marked.csv"
    lines = RUNS.read_text(encoding="utf-8").splitlines()[:2]
    path.write_text("\n".join(lines), encoding="utf-8-sig")
    assert next(iter(read_rows(path)[0])) == "id"


def test_a_column_that_stands_twice_is_refused(tmp_path):
    path = tmp_path / "twice.csv"
    header, row = RUNS.read_text(encoding="utf-8").splitlines()[:2]
    path.write_text(f"{header},id\n{row},other\n", encoding="utf-8")
    with pytest.raises(ValueError, match="'id' twice"):
        read_rows(path)
