"""What holds of every emitter: scripts run what the command says, text stays text, golden files."""

import json
import os
import shutil
import subprocess
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from emit_plans import SAMPLES, Planned, file_of, planned, renamed
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.job import Optimizer, Precision, Target
from costmodels.layout import ContextParallelType, Offload, Recompute, Schedule
from planner.emit import EMITTERS, CannotExpress, emit
from planner.emit.text import comment, identifier, toml_value, yaml_text
from planner.plan import Plan, SolverStatus
from planner.rules import violations

GOLDEN = Path(__file__).parents[1] / "golden" / "emit"
HOSTILE = '"; touch pwned; $(touch pwned) `touch pwned` \n touch pwned #\u2028x: [1] {\x7f} \x00'
TARGETS = sorted(EMITTERS, key=str)


@pytest.mark.parametrize("target", TARGETS)
def test_emitted_files_are_the_golden_ones(target: Target) -> None:
    folder = GOLDEN / target.value
    emission = emit(SAMPLES[target], target)
    assert {file.path for file in emission.files} == {path.name for path in folder.iterdir()}
    for file in emission.files:
        assert file.text == (folder / file.path).read_text(encoding="utf-8"), file.path


def run_launcher(plan: Planned, target: Target, folder: Path, *arguments: str) -> tuple[str, ...]:
    """Run launch.sh with programs that print their arguments, and return what was called."""
    emission = emit(plan, target)
    for file in emission.files:
        (folder / file.path).write_text(file.text, encoding="utf-8")
    for program in ("torchrun", "accelerate"):
        stub = folder / "bin" / program
        stub.parent.mkdir(exist_ok=True)
        stub.write_text(f"#!/bin/sh\nprintf '%s\\0' {program} \"$@\"\n", encoding="utf-8")
        stub.chmod(0o755)
    environment = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "NODE_RANK": "1",
        "MASTER_ADDR": "first-node",
    }
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    done = subprocess.run(
        ["bash", "../launch.sh", *arguments],
        cwd=elsewhere,
        env=environment,
        capture_output=True,
        check=True,
        text=True,
    )
    return tuple(done.stdout.split("\0")[:-1])


@pytest.mark.skipif(shutil.which("bash") is None, reason="launchers are bash")
@pytest.mark.parametrize("target", TARGETS)
def test_the_launcher_runs_the_command_and_hands_words_on(target: Target, tmp_path: Path) -> None:
    called = run_launcher(SAMPLES[target], target, tmp_path, "--lr", "a b")
    command = emit(SAMPLES[target], target).command
    if target is Target.ACCELERATE:  # its launcher is told the node by flags
        node = ("--machine_rank", "1", "--main_process_ip", "first-node")
        place = command.index("train.py")
        command = (*command[:place], *node, *command[place:])
    names = {file.path for file in emit(SAMPLES[target], target).files}
    placed = tuple(str(tmp_path / word) if word in names else word for word in command)
    assert called == (*placed, "--lr", "a b")


@pytest.mark.skipif(shutil.which("bash") is None, reason="launchers are bash")
@pytest.mark.parametrize("target", TARGETS)
def test_a_hostile_model_name_runs_nothing(target: Target, tmp_path: Path) -> None:
    plan = renamed(SAMPLES[target], HOSTILE)
    run_launcher(plan, target, tmp_path)
    assert not list(tmp_path.rglob("pwned"))
    for file in emit(plan, target).files:
        lines = file.text.splitlines()
        assert not any(line.strip().startswith("touch pwned") for line in lines), file.path
        assert "\x00" not in file.text
        if file.path.endswith(".sh") or file.path.endswith(".sbatch"):
            assert len(lines) == len(file_of(emit(SAMPLES[target], target), file.path).splitlines())


@pytest.mark.skipif(shutil.which("bash") is None, reason="launchers are bash")
def test_several_nodes_ask_for_rank_and_address(tmp_path: Path) -> None:
    script = tmp_path / "launch.sh"
    script.write_text(file_of(emit(SAMPLES[Target.MEGATRON], Target.MEGATRON), "launch.sh"))
    done = subprocess.run(
        ["bash", str(script)],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode != 0
    assert "NODE_RANK" in done.stderr


def test_one_node_asks_for_neither() -> None:
    text = file_of(emit(planned(zero_stage=1), Target.MEGATRON), "launch.sh")
    assert "NODE_RANK" not in text
    assert "--nnodes=1 --nproc-per-node=8" in text


@pytest.mark.parametrize("target", TARGETS)
def test_the_json_form_is_the_contract_s(target: Target) -> None:
    answer = json.loads(json.dumps(emit(SAMPLES[target], target).to_json()))
    assert answer["schema"] == 1
    assert answer["target"] == target.value
    assert all(set(file) == {"path", "text"} for file in answer["files"])
    assert all(isinstance(value, str) for value in answer["environment"].values())
    assert answer["command"][0] in ("torchrun", "accelerate")


@pytest.mark.parametrize("target", TARGETS)
def test_every_variable_of_the_environment_has_a_reason_in_the_launcher(target: Target) -> None:
    emission = emit(SAMPLES[target], target)
    text = file_of(emission, "launch.sh")
    for variable in emission.environment:
        assert f"# {variable.reason}\nexport {variable.name}=" in text


def test_an_illegal_layout_is_refused_by_the_target_s_own_rules() -> None:
    plan = planned("qwen2.5-7b", 8, tensor_parallel=8, zero_stage=0)
    with pytest.raises(ValueError, match=r"illegal for megatron: .*28"):
        emit(plan, Target.MEGATRON)


def test_the_plan_s_own_target_does_not_matter() -> None:
    plan = SAMPLES[Target.DEEPSPEED]
    other = replace(plan, job=replace(plan.job, target=Target.MEGATRON))
    assert emit(plan, Target.DEEPSPEED) == emit(other, Target.DEEPSPEED)


def whole_plan() -> Plan:
    plan = planned("tiny", 4, batch=8, job={"seq_len": 128}, zero_stage=1, hardware="cpu-gloo")
    return Plan(
        model=plan.model,
        job=plan.job,
        cluster=plan.cluster,
        layout=plan.layout,
        estimate={},
        solver=SolverStatus(status="given"),
    )


def test_our_own_runtime_runs_the_plan_file() -> None:
    emission = emit(whole_plan(), Target.NATIVE)
    assert {file.path for file in emission.files} >= {"train.py", "plan.json", "launch.sh"}
    with pytest.raises(ValueError, match="a whole plan"):
        emit(SAMPLES[Target.MEGATRON], Target.NATIVE)


def test_every_target_has_an_emitter() -> None:
    assert {*EMITTERS, Target.NATIVE} == set(Target)


MODELS = ("8b", "7b", "qwen3-8b", "qwen2.5-7b", "qwen3-30b-a3b", "deepseek-v2-lite", "gpt-2")


@st.composite
def plans(draw: st.DrawFn) -> Planned:
    tensor = draw(st.sampled_from([1, 2, 4]))
    context = draw(st.sampled_from([1, 2]))
    stages = draw(st.sampled_from([1, 2]))
    per_rank = draw(st.sampled_from([1, 2])) if stages > 1 else 1
    gpus = tensor * context * stages * draw(st.sampled_from([1, 2, 4]))
    one_stage = (Schedule.GPIPE, Schedule.ONE_F_ONE_B)
    several = (Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE, Schedule.ZBV, Schedule.DUALPIPEV)
    offloads = [(), (Offload.OPTIMIZER,), (Offload.OPTIMIZER, Offload.PARAMETERS)]
    return planned(
        draw(st.sampled_from(MODELS)),
        gpus if gpus < 8 else 8 * (gpus // 8),
        job={
            "seq_len": 1024,
            "precision": draw(st.sampled_from(Precision)),
            "optimizer": draw(st.sampled_from(Optimizer)),
            "grad_dtype": draw(st.sampled_from([None, "fp32", "bf16"])),
        },
        tensor_parallel=tensor,
        context_parallel=context,
        pipeline_parallel=stages,
        stages_per_rank=per_rank,
        schedule=draw(st.sampled_from(one_stage if per_rank == 1 else several)),
        zero_stage=draw(st.integers(0, 3)),
        recompute=draw(st.sampled_from(Recompute)),
        context_parallel_type=draw(st.sampled_from(ContextParallelType)),
        offload=draw(st.sampled_from(offloads)),
    )


@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=60, deadline=None)
@given(plan=plans())
def test_a_legal_plan_is_emitted_or_refused_by_name(target: Target, plan: Planned) -> None:
    job = replace(plan.job, target=target)
    legal = not violations(plan.model, job, plan.cluster, plan.layout)
    try:
        emission = emit(plan, target)
    except ValueError as error:
        refusal = error
    else:
        assert legal
        assert emission == emit(plan, target)
        assert emission.command[0] in ("torchrun", "accelerate")
        return
    words = (
        f"{target.value} cannot express " if legal else f"the plan is illegal for {target.value}"
    )
    assert str(refusal).startswith(words)
    assert isinstance(refusal, CannotExpress) == legal


@given(st.text())
def test_toml_strings_read_back(text: str) -> None:
    sound = text.encode("utf-8", "replace").decode()
    assert tomllib.loads(f"value = {toml_value(text)}") == {"value": sound}


@given(st.text())
def test_comments_keep_to_their_line(text: str) -> None:
    assert len(f"# {comment(text)}".splitlines()) == 1


def test_comments_copy_nothing_that_a_shell_would_read():
    text = comment('a $(touch x) `id` \\ ${HOME} "q" ; rm -rf / & | > < # of 8 GPUs')
    assert not set(text) & set('$`\\{}"&|<>#')
    assert text.endswith("of 8 GPUs")


@given(st.text())
def test_identifiers_are_plain(text: str) -> None:
    assert identifier(text)
    assert not set(identifier(text)) - set(
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-"
    )


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
TABLES = st.recursive(
    SCALARS | st.lists(st.integers(), max_size=3),
    lambda inner: st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(["x", "y", "z"]), TABLES, max_size=3))
def test_yaml_reads_back(table: Mapping[str, object]) -> None:
    yaml = pytest.importorskip("yaml")
    assert (yaml.safe_load(yaml_text(table)) or {}) == table
