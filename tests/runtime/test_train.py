"""The folder that apply writes, run as users run it: torchrun, real text, faults."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from costmodels.hardware import make_cluster
from costmodels.job import Precision, TrainingJob
from costmodels.layout import Layout, split_layers
from costmodels.model import ModelSpec
from costmodels.profiles.reader import read_profile
from planner.emit.native import emit_native
from planner.plan import Plan, SolverStatus
from runtime.training.metrics import FINISHED, UNFINISHED

ROOT = Path(__file__).parents[2]
MODEL = ModelSpec(
    name="small",
    architecture="llama",
    hidden_size=32,
    num_layers=4,
    num_attention_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_hidden_size=64,
    vocab_size=256,
    training_seq_len=32,
)


def plan(
    num_ranks,
    name="small",
    precision=Precision.FP32,
    *,
    model=MODEL,
    changes=None,
    seq_len=32,
    **fields,
):
    """Return a plan of a layout's fields, for the small model, a changed one or another."""
    stages = fields.get("pipeline_parallel", 1)
    data = fields.get("data_parallel", 1)
    job = TrainingJob(seq_len=seq_len, global_batch_size=8, precision=precision)
    layout = Layout(
        layers_per_stage=split_layers(4, stages),
        num_micro_batches=8 // data,
        zero_group=data,
        **fields,
    )
    return Plan(
        model=replace(model, **{"name": name} if model is MODEL else {}, **changes or {}),
        job=job,
        cluster=make_cluster(read_profile("cpu-gloo"), num_ranks),
        layout=layout,
        estimate={"time": {"step_seconds": 0.05}},
        solver=SolverStatus(status="given"),
    )


def write(plan, folder):
    folder.mkdir()
    for file in emit_native(plan).files:
        (folder / file.path).write_text(file.text)
    return folder


def environment():
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}


def launch(folder, *arguments, timeout=120):
    return subprocess.run(
        ["bash", str(folder / "launch.sh"), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(),
        cwd=folder.parent,
        check=False,
    )


def lines_of(folder):
    return [json.loads(line) for line in (folder / FINISHED).read_text().splitlines()]


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("All work and no play makes Jack a dull boy.\n" * 40)
    return folder


def test_a_plan_of_two_stages_trains_on_text_and_resumes_where_it_stopped(tmp_path, text):
    folder = write(plan(2, pipeline_parallel=2), tmp_path / "run")
    flags = ("--data", str(text), "--learning-rate", "0.01", "--save-every", "6")
    done = launch(folder, "--steps", "12", *flags, "--trace", "1")
    assert done.returncode == 0, done.stderr
    trace = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in trace if event["name"] == "step 2"} == {0, 1}
    assert re.fullmatch(
        r"step \S+ s measured \(median of 10\), 0\.050 s predicted \([+-]\d+ %\)\n", done.stdout
    )
    measured = lines_of(folder)
    assert [line["step"] for line in measured] == list(range(12))
    assert measured[-1]["loss"] < measured[0]["loss"] - 1.5  # one sentence, soon known
    assert {*measured[0]} >= {
        "loss",
        "tokens_per_second_per_gpu",
        "mfu",
        "step_seconds",
        "reserved_gib",
        "learning_rate",
    }
    assert all(line["tokens_per_second_per_gpu"] > 0 for line in measured)
    assert all(line["dropped_share"] is None for line in measured)  # no limit was asked for
    assert not (folder / UNFINISHED).exists()

    assert "going on" not in done.stderr
    again = launch(
        folder, "--steps", "12", *flags, "--resume", str(folder / "checkpoints/step-00000006")
    )
    assert again.returncode == 0, again.stderr
    resumed = lines_of(folder)[12:]
    assert [line["step"] for line in resumed] == list(range(6, 12))
    for old, new in zip(measured[6:], resumed, strict=True):
        assert new["loss"] == pytest.approx(old["loss"], abs=1e-5)


def test_a_killed_rank_is_named_and_the_record_stays_unfinished(tmp_path):
    folder = write(plan(2, data_parallel=2, zero_stage=1), tmp_path / "run")
    job = subprocess.Popen(
        ["bash", str(folder / "launch.sh"), "--steps", "100000", "--synthetic"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    try:
        wait_for_steps(folder, job)
        os.kill(pid_of_rank(1, folder), signal.SIGKILL)
        _, errors = job.communicate(timeout=60)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode != 0
    assert re.search(r"rank 1 died in step \d+; rank 0 ends", errors)
    assert not (folder / FINISHED).exists()
    assert (folder / UNFINISHED).exists()


def wait_for_steps(folder, job, seconds=90):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and job.poll() is None:
        record = folder / UNFINISHED
        if record.exists() and len(record.read_text().splitlines()) > 2:
            return
        time.sleep(0.1)
    said = job.stderr.read() if job.poll() is not None else "it still runs"
    raise AssertionError(f"the job made no steps: {said}")


def pid_of_rank(rank, folder):
    """Find a rank's process by what torchrun put into its environment."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            variables = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(folder / "train.py").encode() in command and f"RANK={rank}".encode() in variables:
            return int(process.name)
    raise AssertionError(f"no process of rank {rank}")


def test_wrong_input_is_one_message_and_status_2(tmp_path, text):
    folder = write(plan(2, data_parallel=2), tmp_path / "run")
    for arguments, message in [
        (("--data", str(tmp_path / "nowhere")), "error: no such file or folder: "),
        (("--steps", "many"), "train.py: error: argument --steps: must be a whole number"),
        (("--data", str(text), "--synthetic"), "--synthetic and --data exclude each other"),
    ]:
        failed = launch(folder, *arguments)
        assert failed.returncode == 2
        assert message in failed.stderr
        assert failed.stderr.count("error:") == 1
        assert "Traceback" not in failed.stderr
        assert not failed.stdout


def test_names_from_strangers_reach_no_script_unescaped():
    name = 'x"""\nimport os; os.system("touch /tmp/owned")  # $(touch /tmp/owned) `id`'
    emission = emit_native(plan(2, name=name, data_parallel=2))
    for file in emission.files:
        if file.path != "plan.json":
            assert "os.system(" not in file.text
            assert "$(touch" not in file.text
            assert "`id`" not in file.text
    script = next(file.text for file in emission.files if file.path == "train.py")
    compile(script, "train.py", "exec")
    assert '"data_parallel": 2,' in script


def test_every_variable_has_its_reason_in_the_launcher():
    emission = emit_native(plan(2, data_parallel=2))
    launcher = next(file.text for file in emission.files if file.path == "launch.sh")
    for variable in emission.environment:
        assert f"# {variable.reason}" in launcher
        assert f"export {variable.name}={variable.value}" in launcher
    assert emission.command[0] == "torchrun"


def test_a_layout_that_the_runtime_cannot_cut_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"illegal for native: .*\b4\b.*\b2\b"):
        emit_native(plan(4, tensor_parallel=4))  # two key-value heads
