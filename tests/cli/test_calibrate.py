"""`planner calibrate`: the profile goes to the file or to stdout, progress to stderr."""

import json

import pytest

from costmodels.profiles.reader import read_profile
from planner.cli import main

measuring = pytest.importorskip("runtime.measure.profile")


@pytest.fixture
def measured(monkeypatch):
    """A machine that measures in no time; returns what it was asked."""
    asked = []

    def measure(device, ranks, progress):
        asked.append((device, ranks))
        progress("measuring")
        return read_profile("cpu-gloo", ("device.num_sms=3",))

    monkeypatch.setattr(measuring, "measure_profile", measure)
    return asked


def test_the_file_is_a_profile_that_every_verb_reads(measured, tmp_path, capsys):
    path = tmp_path / "cpu.toml"
    assert main(["calibrate", "--ranks", "4", "-o", str(path)]) == 0
    assert read_profile(str(path)).device.num_sms == 3
    assert measured == [("cpu", 4)]
    out, err = capsys.readouterr()
    assert out == ""
    assert "measuring" in err
    assert str(path) in err


def test_without_a_file_the_profile_goes_to_stdout(measured, tmp_path, capsys):
    assert main(["calibrate", "--device", "cpu"]) == 0
    path = tmp_path / "cpu.toml"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    assert read_profile(str(path)).device.num_sms == 3


def test_json_is_one_object_on_stdout(measured, capsys):
    assert main(["calibrate", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == 1
    assert told["profile"]["device"]["num_sms"] == 3


def test_nonsense_is_wrong_usage(capsys):
    assert main(["calibrate", "--ranks", "0"]) == 2
    assert "--ranks must be 1 to 64" in capsys.readouterr().err


def test_a_rank_that_fails_is_no_answer_and_no_traceback(monkeypatch, capsys):
    from runtime.launch import RankFailedError  # noqa: PLC0415  (torch is optional here)

    def measure(device, ranks, progress):
        raise RankFailedError("rank 1 failed:\nTraceback ...\nOSError: no memory left")

    monkeypatch.setattr(measuring, "measure_profile", measure)
    assert main(["calibrate"]) == 1
    err = capsys.readouterr().err
    assert "rank 1 failed: OSError: no memory left" in err
    assert "Traceback" not in err


def test_a_file_that_cannot_be_written_is_named(measured, tmp_path, capsys):
    assert main(["calibrate", "-o", str(tmp_path / "none" / "cpu.toml")]) == 2
    assert "cannot write" in capsys.readouterr().err
