"""Measured sweeps: files read strictly, predictions made anew, order judged where it is clear."""

import json
from dataclasses import replace

import pytest

from costmodels.hardware import make_cluster
from costmodels.job import Precision, TrainingJob
from costmodels.layout import Layout
from costmodels.profiles.reader import read_profile
from costmodels.time.estimate import estimate_time
from planner.cli import main
from planner.measured.runs import MeasuredRun
from planner.measured.sweeps import (
    Sweep,
    SweptLayout,
    clear_order,
    read_sweep,
    runs_of,
    write_sweep,
)
from planner.presets import read_model

MODEL = read_model("tiny")
JOB = TrainingJob(seq_len=32, global_batch_size=4, precision=Precision.FP32)
LAYOUT = Layout(data_parallel=2, num_micro_batches=2, layers_per_stage=(8,))
SWEEP = Sweep(
    command="python examples/compare/compare.py",
    conditions="2 cores",
    model=MODEL,
    job=JOB,
    cluster=make_cluster(read_profile("cpu-gloo"), 2),
    layouts=(
        SweptLayout(layout=LAYOUT, step_seconds=(0.5, 0.1, 0.2, 0.3, 0.4)),
        SweptLayout(layout=replace(LAYOUT, zero_stage=1), step_seconds=(0.2, 0.2), slept_for=0.25),
    ),
)


def test_a_sweep_comes_back_from_its_file_as_it_was_written(tmp_path):
    write_sweep(SWEEP, tmp_path / "sweep.json")
    assert read_sweep(tmp_path / "sweep.json") == SWEEP
    first = (tmp_path / "sweep.json").read_bytes()
    write_sweep(read_sweep(tmp_path / "sweep.json"), tmp_path / "sweep.json")
    assert (tmp_path / "sweep.json").read_bytes() == first


def test_real_work_is_predicted_anew_and_sleeps_against_what_was_slept():
    real, slept = runs_of(SWEEP)
    assert real.predicted == estimate_time(MODEL, JOB, SWEEP.cluster, LAYOUT).step_seconds
    assert (real.measured, real.spread, real.num_steps) == (0.3, (0.2, 0.4), 5)
    assert (slept.predicted, slept.measured) == (0.25, 0.2)
    assert slept.error == pytest.approx(0.25)
    assert slept.label.endswith("(2 ranks, slept)")


def test_planner_plot_draws_a_sweep_and_says_how_far_off_it_is(tmp_path, capsys):
    write_sweep(SWEEP, tmp_path / "sweep.json")
    figure = tmp_path / "sweep.svg"
    assert main(["plot", str(tmp_path / "sweep.json"), "-o", str(figure), "--json"]) == 0
    (written,) = json.loads(capsys.readouterr().out)["figures"]
    error = sum(abs(run.error) for run in runs_of(SWEEP)) / 2
    assert written["title"].startswith(
        f"Step times of 2 layouts are predicted {error:.0%} off on average"
    )
    assert figure.read_text().count("slept") >= 1


def run(measured, predicted, spread=0.0):
    return MeasuredRun(
        label="",
        predicted=predicted,
        measured=measured,
        spread=(measured - spread / 2, measured + spread / 2),
        num_steps=3,
    )


def test_order_counts_only_pairs_further_apart_than_twice_the_spread():
    runs = [run(1.0, 1.0, 0.25), run(1.5, 0.5), run(2.0, 2.0)]
    # 1.0 and 1.5 are apart by no more than twice 0.25; the two other pairs are in order.
    assert clear_order(runs) == (1.0, 2)
    assert clear_order([run(1.0, 1.0), *runs[1:]]) == (pytest.approx(1 / 3), 3)
    assert clear_order([run(1.0, 2.0), run(2.0, 1.0)]) == (-1.0, 1)
    assert clear_order([]) == (1.0, 0)


def broken(tmp_path, change):
    write_sweep(SWEEP, tmp_path / "sweep.json")
    document = json.loads((tmp_path / "sweep.json").read_text())
    change(document)
    (tmp_path / "sweep.json").write_text(json.dumps(document))
    return tmp_path / "sweep.json"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(kind="plan"), "is no measured sweep"),
        (lambda d: d.update(schema=9), "schema 9; this version reads 1"),
        (lambda d: d["sweep"].pop("job"), "not a valid sweep.*job"),
        (
            lambda d: d["sweep"]["layouts"][1].update(step_seconds=[0.1]),
            r"layouts\[1\].step_seconds must hold at least 2 positive numbers, not \[0.1\]",
        ),
        (lambda d: d["sweep"]["layouts"][0].update(step_seconds=[0.1, -1.0]), r"layouts\[0\]"),
    ],
)
def test_a_file_that_is_no_sweep_is_refused_by_name(tmp_path, change, words):
    with pytest.raises(ValueError, match=words):
        read_sweep(broken(tmp_path, change))
