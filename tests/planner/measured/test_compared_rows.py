"""The rows that examples/compare measured: they are read, predicted and drawn as committed."""

from pathlib import Path

import pytest

from planner.measured.sweeps import read_sweep, runs_of

FOLDER = Path(__file__).parents[3] / "examples" / "compare"
SWEEPS = sorted((FOLDER / "measured").glob("ranks-*.json"))


def test_there_are_rows_of_at_least_twelve_layouts():
    assert sum(len(read_sweep(path).layouts) for path in SWEEPS) >= 12


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_row_is_predicted_within_a_factor_of_two(path):
    worst = max((abs(run.error), run.label) for run in runs_of(read_sweep(path)))
    assert worst[0] < 1.0, worst


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_sleeps_carry_what_was_slept_and_real_work_does_not(path):
    sweep = read_sweep(path)
    sleeps = sweep.cluster.num_gpus > 2
    assert all((swept.slept_for is not None) == sleeps for swept in sweep.layouts)
    assert all(swept.layout.num_gpus == sweep.cluster.num_gpus for swept in sweep.layouts)


def test_the_figure_stands_beside_its_rows():
    assert (FOLDER / "predicted_vs_measured.svg").read_text(encoding="utf-8").startswith("<?xml")
