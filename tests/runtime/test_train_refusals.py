"""What cannot be trained is refused in one message, before ranks meet where that can be."""

import subprocess
import sys

import pytest
from test_train import environment, plan, write

from runtime import train
from runtime.train import check_choices, check_world_size


def test_train_refuses_a_world_that_is_not_the_plans(tmp_path, monkeypatch):
    folder = write(plan(4, data_parallel=2, tensor_parallel=2), tmp_path / "run")
    alone = subprocess.run(
        [sys.executable, str(folder / "train.py")],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
        timeout=60,
    )
    assert alone.returncode == 2
    assert "error: the plan is for 4 ranks, this job has 1; start it with launch.sh" in alone.stderr
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ValueError, match="for 4 ranks, this job has 8"):
        check_world_size(plan(4, data_parallel=2, tensor_parallel=2))


def test_choices_that_disagree_with_the_plan_are_refused_by_name():
    given = plan(2, data_parallel=2)
    check_choices(given, {"data_parallel": 2, "schedule": "1f1b", "layers_per_stage": (4,)})
    with pytest.raises(ValueError, match=r"says tensor_parallel = 2, plan\.json says 1"):
        check_choices(given, {"tensor_parallel": 2})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--capacity-factor 1.5", "--capacity-factor 1.5: small has no experts"),
        ("--bias-update-rate 0.001 --check", "small has no routers that correct their choice"),
    ],
)
def test_flags_that_do_not_suit_the_model_are_refused_before_ranks_meet(
    flags, message, tmp_path, monkeypatch, capsys
):
    folder = write(plan(2, data_parallel=2), tmp_path / "run")
    monkeypatch.setattr(sys, "argv", ["train.py", *flags.split()])
    monkeypatch.setattr(train, "join", None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train.run(folder / "plan.json", {}, train=print) == train.WRONG_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two' in the environment, not a whole number"),
        ({"RANK": "first"}, "RANK is 'first' in the environment, not a whole number"),
        ({"RANK": "2"}, "there is no rank 2 (RANK) of 2 (WORLD_SIZE), counted from 0"),
        ({"MASTER_ADDR": ""}, "WORLD_SIZE is set in the environment and MASTER_ADDR is not"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http' in the environment"),
    ],
)
def test_a_launch_that_cannot_be_is_one_message_and_status_2(
    variables, message, tmp_path, monkeypatch, capsys
):
    folder = write(plan(2, data_parallel=2), tmp_path / "run")
    given = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in {**given, **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["train.py", "--synthetic"])
    monkeypatch.setattr(train, "join", None)
    assert train.run(folder / "plan.json", {}, train=print) == train.WRONG_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")


def test_ranks_that_do_not_meet_are_one_message_and_status_1(tmp_path, monkeypatch, capsys):
    folder = write(plan(2, data_parallel=2), tmp_path / "run")
    launch_of = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in launch_of.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["train.py", "--synthetic", "--timeout", "1"])
    assert train.run(folder / "plan.json", {}, train=print) == train.BROKEN
    assert "error: rank 1 did not meet the others: " in capsys.readouterr().err
