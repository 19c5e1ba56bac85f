"""The command line's promises: verbs, flags, help, exit statuses, start-up."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from planner.cli import VERBS, main

HEAVY = ("torch", "ortools", "sympy", "matplotlib")

# The contract's flags; a flag that is added or lost shows here.
SHARED = {
    "--model",
    "--hardware",
    "--set",
    "--gpus",
    "--gpus-per-node",
    "--seq-len",
    "--global-batch-size",
    "--precision",
    "--attention",
    "--optimizer",
    "--grad-dtype",
    "--loss",
    "--lora-rank",
    "--memory-taken-gib",
    "--target",
}
LAYOUT = {
    "--dp",
    "--data-parallel",
    "--tp",
    "--tensor-parallel",
    "--pp",
    "--pipeline-parallel",
    "--cp",
    "--context-parallel",
    "--ep",
    "--expert-parallel",
    "--etp",
    "--expert-tensor-parallel",
    "--zero",
    "--zero-group",
    "--keep-gathered",
    "--mbs",
    "--micro-batch-size",
    "--vpp",
    "--stages-per-rank",
    "--schedule",
    "--recompute",
    "--recompute-layers",
    "--sequence-parallel",
    "--cp-type",
    "--offload",
    "--layers-per-stage",
}


def imported_by(code):
    """Return which heavy modules a fresh interpreter holds after running code."""
    script = f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\n"
    script += f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return done.stderr.strip().splitlines()[-1]


def help_text(capsys, *words):
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--help"])
    assert stopped.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_that_ends_in_an_example(capsys, verb):
    text = help_text(capsys, verb)
    assert VERBS[verb].lower() in " ".join(text.lower().split())
    assert text.rstrip().splitlines()[-1].lstrip().startswith(("example:", "planner ", "-"))
    assert f"example: planner {verb}" in " ".join(text.split())
    assert "--json" in text


@pytest.mark.parametrize("verb", ["search", "estimate"])
def test_the_contracts_flags_are_all_there(capsys, verb):
    words = set(help_text(capsys, verb).replace(",", " ").replace("[", " ").split())
    assert words >= SHARED
    assert words >= LAYOUT


def test_help_imports_nothing_heavy():
    assert imported_by("from planner.cli import main; main(['--help'])") == "[]"


def test_estimate_imports_neither_torch_nor_sympy():
    code = "from planner.cli import main; main(['estimate', '--model', '8b', '--gpus', '8'])"
    assert imported_by(code) == "[]"


def test_search_imports_no_torch_no_sympy_no_matplotlib():
    code = (
        "from planner.cli import main; "
        "main(['search', '--model', 'tiny', '--gpus', '2', '--hardware', 'cpu-gloo'])"
    )
    assert imported_by(code) in ("[]", "['ortools']")


@pytest.mark.parametrize(
    ("words", "status", "mentions"),
    [
        (["estimate", "--model", "8b", "--gpus", "-8"], 2, ["--gpus", "-8"]),
        (["estimate", "--model", "8b", "--gpus", "eight"], 2, ["gpus", "eight"]),
        (["estimate", "--model", "9b", "--gpus", "8"], 2, ["9b", "8b"]),
        (["estimate", "--model", "8b", "--gpus", "8", "--hardware", "h1000"], 2, ["h1000"]),
        (["estimate", "--model", "8b", "--gpus", "12"], 2, ["12", "8", "node"]),
        (["apply", "nowhere.json"], 2, ["nowhere.json"]),
        (["validate", "nowhere.csv"], 2, ["nowhere.csv"]),
    ],
)
def test_bad_input_gives_one_message_and_no_traceback(capsys, words, status, mentions):
    assert main(words) == status
    streams = capsys.readouterr()
    assert "Traceback" not in streams.err
    for word in mentions:
        assert word in streams.err


def test_an_error_is_json_where_json_was_asked_for(capsys):
    assert main(["estimate", "--model", "9b", "--gpus", "8", "--json"]) == 2
    assert "9b" in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.parametrize(
    ("flag", "value", "known"),
    [
        ("--precision", "int3", "bf16"),
        ("--target", "nosuch", "megatron"),
        ("--optimizer", "nosuch", "adamw"),
        ("--mbs", "0", "less than 1"),
        ("--seq-len", "0", "less than 1"),
        ("--offload", "disk", "optimizer"),
        ("--layers-per-stage", "7,x", "whole number"),
    ],
)
def test_wrong_values_name_the_flag_and_what_is_known(capsys, flag, value, known):
    with pytest.raises(SystemExit) as stopped:
        main(["estimate", "--model", "8b", "--gpus", "8", flag, value])
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert flag in message
    assert known in message


def test_short_and_long_names_are_one_flag(capsys):
    inputs = ["estimate", "--model", "8b", "--gpus", "16", "--json", "--zero", "1"]
    short = ["--tp", "2", "--pp", "2", "--mbs", "2"]
    long = ["--tensor-parallel", "2", "--pipeline-parallel", "2", "--micro-batch-size", "2"]
    main(inputs + short)
    first = capsys.readouterr().out
    main(inputs + long)
    assert capsys.readouterr().out == first


def test_one_tensor_rank_has_no_sequence_to_split(capsys):
    asked = ["estimate", "--model", "tiny", "--gpus", "2", "--json", "--sequence-parallel"]
    for degree, splits in (("1", False), ("2", True)):
        main([*asked, "--tp", degree])
        assert json.loads(capsys.readouterr().out)["layout"]["sequence_parallel"] is splits


def test_an_illegal_layout_says_why_and_exits_with_1(capsys):
    words = ["estimate", "--model", "qwen2.5-7b", "--gpus", "8", "--tp", "8", "--json"]
    assert main(words) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["verdict"] == "illegal"
    assert answer["memory"] is None
    assert answer["time"] is None
    assert [1, 2, 4] in [v["allowed"].get("tensor_parallel") for v in answer["violations"]]


def test_flags_beside_a_plan_are_refused_not_ignored(capsys, tmp_path):
    path = tmp_path / "plan.json"
    words = ["--model", "tiny", "--hardware", "cpu-gloo", "--gpus", "1", "-o", str(path)]
    assert main(["search", *words]) == 0
    assert main(["estimate", str(path), "--json"]) == 0
    capsys.readouterr()
    assert main(["estimate", str(path), "--tp", "8", "--zero", "1", "--set", "a=1"]) == 2
    assert "--set, --tensor-parallel, --zero beside" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["8_0", "\uff18", "8.0", " 8", "0x8", ""])
def test_counts_are_plain_digits(capsys, text):
    assert main(["estimate", "--model", "8b", "--gpus", text]) == 2
    assert "is not a whole number" in capsys.readouterr().err


def test_no_time_is_spent_on_an_answer_that_cannot_be_written(capsys, tmp_path):
    path = tmp_path / "absent" / "plan.json"
    assert main(["search", "--model", "70b", "--gpus", "64", "-o", str(path)]) == 2
    assert f"cannot write {path}" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_under_stdout_gives_one_message():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "planner", "models"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == "planner models: cannot write the output: No space left on device\n"
