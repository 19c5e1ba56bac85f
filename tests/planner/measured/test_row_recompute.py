"""What a row's recomputation may mean, by the software that ran it."""

import csv
from pathlib import Path

from costmodels.layout import Recompute
from planner.measured.rows import interpret

RUNS = Path(__file__).parents[2] / "golden" / "measured_runs.csv"


def test_fsdp_trainers_recompute_a_share_of_whole_blocks():
    with RUNS.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        row = next(
            r for r in rows if r["family"].startswith("ibm-fms-fsdp") and r["layers"] == "80"
        )
    asked = interpret(row)
    assert {one.recompute for one in asked.layouts} == {Recompute.FULL}
    assert [one.recompute_layers for one in asked.layouts] == [40, 60, 80]
    assert "share of recomputed blocks not stated: the fastest that fits" in asked.note
