"""Files that no planner wrote, given to plot and validate: one message each, exit status 1 or 2."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from costmodels.layout import Layout
from planner.cli import main
from planner.codec import decode
from planner.report import layout_words

GOLDEN = Path(__file__).parents[1] / "golden" / "measured_runs.csv"
POINT = {
    "model": {"name": "m"},
    "hardware": {"name": "h", "gpus": 8},
    "time": {"tokens_per_second_per_gpu": 1.0},
}


def changed(**parts):
    return {name: {**value, **parts.get(name, {})} for name, value in POINT.items()}


TEXTS = {
    "broken": "{",
    "a list": "[]",
    "a number": "3",
    "not a number": '{"plans": [NaN]}',
    "plans a number": '{"plans": 3}',
    "plans a table": '{"plans": {"a": 1}}',
    "an empty estimate": '{"plans": [{}]}',
    "no estimate": '{"plans": [3]}',
    "endless gpus": json.dumps({"plans": [changed(hardware={"gpus": 0})]}).replace("0", "1e999"),
    "no gpus": json.dumps({"plans": [changed(hardware={"gpus": 0})]}),
    "time runs backwards": json.dumps(
        {"plans": [changed(time={"tokens_per_second_per_gpu": -1.0})]}
    ),
    "a sweep of nothing": '{"kind": "measured sweep", "schema": 1, "sweep": {}}',
}


def refused(capsys, words):
    """Check that a verb ends with one message and no traceback; return the message."""
    status = main([str(word) for word in words])
    streams = capsys.readouterr()
    assert status in (1, 2)
    assert "Traceback" not in streams.err
    (line,) = streams.err.strip().splitlines()
    return line


@pytest.mark.parametrize("name", TEXTS)
def test_no_figure_is_drawn_of_what_no_planner_wrote(capsys, tmp_path, name):
    path, figure = tmp_path / "input.json", tmp_path / "figure.svg"
    path.write_text(TEXTS[name])
    line = refused(capsys, ["plot", path, "-o", figure])
    assert line.startswith("planner plot: ")
    assert not figure.exists()


@pytest.fixture(scope="module")
def plan_text(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    words = ["search", "--model", "tiny", "--hardware", "cpu-gloo", "--gpus", "2", "--dp", "2"]
    assert main([*words, "-o", str(path)]) == 0
    return path.read_text()


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 1',
        "[]",
        '{"step": 3, "step_seconds": NaN}',
        '{"step": "x", "step_seconds": 1.0}',
        '{"step": 3, "step_seconds": -1.0}',
        '{"step": 3, "step_seconds": "1.0"}',
        "",
    ],
)
def test_measured_steps_that_make_no_sense_are_refused(capsys, tmp_path, plan_text, line):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.json").write_text(plan_text)
    (tmp_path / "run" / "measured.jsonl").write_text(5 * f"{line}\n")
    capsys.readouterr()
    words = refused(capsys, ["plot", tmp_path / "run", "-o", tmp_path / "figure.svg"])
    assert "measured.jsonl" in words


def test_a_table_without_rows_is_no_answer(capsys, tmp_path):
    path = tmp_path / "header.csv"
    path.write_text(GOLDEN.read_text().splitlines(keepends=True)[0])
    for flags in ([], ["--json"]):
        assert main(["validate", str(path), *flags]) == 1
        streams = capsys.readouterr()
        assert "has a header and no row" in streams.err
        assert streams.out == "" or json.loads(streams.out).keys() == {"error"}


def test_words_of_a_layout_tell_sequence_parallelism_apart(plan_text):

    layout = replace(decode(Layout, json.loads(plan_text)["layout"], "layout"), tensor_parallel=2)
    plain, cut = (layout_words(replace(layout, sequence_parallel=sp)) for sp in (False, True))
    assert "tp2 no-sp" in plain
    assert cut == plain.replace(" no-sp", "")
