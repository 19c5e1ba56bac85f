"""`--model package.module:function`, from search to a script that names it; torch only for it."""

import json
import sys
from pathlib import Path

import pytest

from planner.cli import main

MODULES = Path(__file__).parents[1] / "runtime"
JOB = ["--gpus", "4", "--hardware", "cpu-gloo", "--seq-len", "16", "--global-batch-size", "16"]
LAYOUT = ["--tp", "2", "--pp", "2", "--precision", "fp32"]
GPT, MIXER = "plain_modules:plain_gpt", "plain_modules:plain_mixer"


def answered(capsys, words):
    status = main([str(word) for word in words])
    streams = capsys.readouterr()
    return status, streams.out, streams.err


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    sys.path.insert(0, str(MODULES))
    words = ["search", "--model", MIXER, *JOB, *LAYOUT, "--schedule", "1f1b", "-o", path]
    assert main([str(word) for word in words]) == 0
    return path


def test_estimate_prints_roles_and_counts_the_modules_parameters(capsys, plan):
    status, out, err = answered(capsys, ["estimate", "--model", MIXER, *JOB, *LAYOUT, "--json"])
    estimate = json.loads(out)
    assert status == 0
    assert estimate["model"]["num_parameters"] == 24_168
    assert "cut by rows: (mixer_a to mixer_d).o.weight" in err
    assert "warning: no rule cuts (mixer_a to mixer_d).blend.weight" in err


def test_apply_wants_the_function_again_and_the_script_names_it(capsys, plan):
    status, out, err = answered(capsys, ["apply", plan, "--json"])
    assert status == 2
    assert "which a plan cannot hold" in err
    assert json.loads(out).keys() == {"error"}
    status, out, _ = answered(capsys, ["apply", plan, "--model", MIXER, "--json"])
    (script,) = [f["text"] for f in json.loads(out)["files"] if f["path"] == "train.py"]
    assert status == 0
    assert f'MODULE = "{MIXER}"' in script
    assert "CHOICES, train, MODULE)" in script
    compile(script, "train.py", "exec")
    assert MIXER not in plan.read_text()


@pytest.mark.parametrize("text", ["x; import os", "a.b:c()", "a:b'", "70b", ""])
def test_no_other_text_reaches_the_script(capsys, plan, text):
    with pytest.raises(SystemExit) as end:
        main(["apply", str(plan), "--model", text])
    assert end.value.code == 2
    assert "package.module:function" in capsys.readouterr().err


def test_another_framework_cannot_express_a_module(capsys, plan):
    status, _, err = answered(capsys, ["apply", plan, "--target", "megatron"])
    assert status == 1
    assert "megatron cannot express the module plain_mixer" in err


def test_verify_counts_the_modules_work_and_refuses_another_module(capsys, plan):
    status, _, err = answered(capsys, ["verify", plan, "--model", GPT, "--json"])
    assert status == 2
    assert "is not the plan's module: num_kv_heads is 4 there and 2 here" in err
    _, out, _ = answered(capsys, ["verify", plan, "--model", MIXER, "--json"])
    report = json.loads(out)
    assert report["collectives_agree"]
    for role in report["roles"]:
        for pair in (role["flops"], *role["bytes"].values()):
            assert pair["graph"] == pair["estimate"]
