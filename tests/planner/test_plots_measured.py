"""Run folders and tables of measured runs, read for the figures."""

import json

import pytest

from planner.measured import runs as reading
from planner.measured.runs import (
    MEASURED_FILE,
    PLAN_FILE,
    generation_of,
    kendall_tau,
    read_run,
    rows_by_generation,
)


class FakePlan:
    """Only what `read_run` looks at."""

    def __init__(self, estimate):
        self.estimate = estimate
        self.layout = None


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run folder whose plan predicts 2 s; returns a function that writes the measured lines."""
    plan = FakePlan({"time": {"step_seconds": 2.0}})
    monkeypatch.setattr(reading, "read_plan", lambda _: plan)
    monkeypatch.setattr(reading, "layout_words", lambda _: "tp2 pp2")

    def write(*lines, estimate=None):
        if estimate is not None:
            plan.estimate = estimate
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (tmp_path / MEASURED_FILE).write_text("\n".join(texts) + "\n", encoding="utf-8")
        return tmp_path

    return write


def steps(*seconds):
    return [{"step": i, "step_seconds": value, "loss": 9.0} for i, value in enumerate(seconds)]


def test_a_run_is_the_median_of_its_steps_after_the_warm_up(folder):
    run = read_run(folder(*steps(60.0, 30.0, 1.0, 5.0, 2.5, 2.5, 2.5)))
    assert (run.label, run.predicted, run.measured, run.num_steps) == ("tp2 pp2", 2.0, 2.5, 5)
    assert run.error == pytest.approx(-0.2)
    assert run.spread == (1.75, 3.75)  # quartiles of 1, 2.5, 2.5, 2.5, 5, ends excluded


def test_one_counted_step_is_enough(folder):
    run = read_run(folder(*steps(9.0, 9.0, 4.0)))
    assert (run.measured, run.spread) == (4.0, (4.0, 4.0))


def test_lines_about_the_run_as_a_whole_are_passed_over(folder):
    run = read_run(folder({"world_size": 4}, "", *steps(9.0, 9.0, 4.0)))
    assert run.num_steps == 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (steps(1.0, 1.0), "holds 2 steps; the first 2 are warm-up, so at least 3 are needed"),
        (["{broken"], "line 1 is no JSON object"),
        (["[1, 2]"], "line 1 is no JSON object"),
        ([{"step_seconds": -1.0}], r"line 1: step_seconds is -1\.0"),
        ([{"step_seconds": "fast"}], "line 1: step_seconds is 'fast'"),
        (['{"step_seconds": Infinity}'], "line 1: step_seconds is inf"),
        ([{"step_seconds": True}], "line 1: step_seconds is True"),
    ],
)
def test_a_malformed_measurement_is_refused_by_line(folder, lines, message):
    path = folder(*lines)
    with pytest.raises(ValueError, match=message) as caught:
        read_run(path)
    assert str(path / MEASURED_FILE) in str(caught.value)


def test_a_plan_without_a_predicted_time_is_refused(folder):
    path = folder(*steps(1.0, 1.0, 1.0), estimate={"time": None})
    with pytest.raises(ValueError, match=r"has no estimate\.time\.step_seconds") as caught:
        read_run(path)
    assert str(path / PLAN_FILE) in str(caught.value)


def test_a_folder_without_measurements_is_refused(tmp_path, folder):
    with pytest.raises(ValueError, match=r"cannot read .*measured\.jsonl"):
        read_run(tmp_path)


def test_a_run_that_died_is_not_taken_for_a_finished_one(tmp_path, folder):
    (tmp_path / "measured.jsonl.part").write_text(json.dumps(steps(1.0)[0]), encoding="utf-8")
    with pytest.raises(ValueError, match=r"has not finished: it left only measured\.jsonl\.part"):
        read_run(tmp_path)


def test_kendall_counts_pairs_in_the_same_order():
    assert kendall_tau([(1, 10), (2, 20), (3, 30)]) == 1
    assert kendall_tau([(1, 30), (2, 20), (3, 10)]) == -1
    assert kendall_tau([(1, 10), (2, 30), (3, 20)]) == pytest.approx(1 / 3)
    assert kendall_tau([(1, 10), (1, 20)]) == 0  # a tie counts for neither
    assert kendall_tau([(1, 1)]) == 1


def row(**changed):
    known = {
        "gpu": "H100-SXM-80GB",
        "family": "a/b",
        "status": "ok",
        "core": "1",
        "tokens_per_sec_per_gpu": "1000",
        "step_seconds": "",
        "predicted_tokens_per_second_per_gpu": "1200",
        "predicted_step_seconds": "3",
    }
    return known | changed


def test_rows_are_sorted_by_generation_and_family():
    groups = rows_by_generation([row(), row(gpu="A100-SXM-80GB"), row(gpu="H200-SXM-141GB")])
    assert {name: len(rows) for name, rows in groups.items()} == {"ampere": 1, "hopper": 2}
    (member,) = groups["ampere"]
    assert (member.family, member.measured) == ("a/b", 1000.0)
    assert member.ratio == pytest.approx(1.2)


def test_rows_that_nothing_can_be_said_of_are_left_out():
    rows = [
        row(status="oom"),
        row(core="0"),
        row(tokens_per_sec_per_gpu=""),
        row(predicted_tokens_per_second_per_gpu="", predicted_step_seconds=""),
    ]
    assert rows_by_generation(rows) == {}


def test_a_row_with_only_step_seconds_counts_by_steps_per_second():
    (member,) = rows_by_generation([row(tokens_per_sec_per_gpu="", step_seconds="6")])["hopper"]
    assert member.measured == pytest.approx(1 / 6)
    assert member.ratio == pytest.approx(2.0)  # predicted to take half as long


def test_a_gpu_without_profile_is_a_generation_of_its_own():
    assert generation_of("TPU-v5p") == "TPU-v5p"
    assert generation_of("") == "unknown"
