"""Runs that are disturbed: each disturbance has one outcome, and nothing saved is lost."""

import os
import resource
import signal
import subprocess

import pytest
import torch
from parity_cases import MODELS, lowered, micro_batches, start
from test_train import environment, launch, lines_of, pid_of_rank, plan, wait_for_steps, write

from costmodels.job import Optimizer
from costmodels.layout import Layout
from runtime.checkpoints.folders import LATEST, candidates
from runtime.launch import run_ranks
from runtime.states.optimizer import NotFiniteError, OptimizerSettings, ShardedOptimizer
from runtime.training.metrics import FINISHED
from runtime.training.options import parse_options
from runtime.training.run_state import FOLDER, differences, record_of_run

FLAGS = ("--synthetic", "--learning-rate", "0.01")


def begin(folder, *arguments, **variables):
    return subprocess.Popen(
        ["bash", str(folder / "launch.sh"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment(), **variables},
        start_new_session=True,
    )


def end_of(job):
    """Return what a job says until it ends; a job that hangs is killed and fails the test."""
    try:
        return job.communicate(timeout=240)[1]
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)


def test_a_run_whose_rank_is_killed_goes_on_by_itself_and_ends_as_if_nothing_had_been(tmp_path):
    steps = ("--steps", "24", "--save-every", "2", *FLAGS)
    folder = write(plan(2, data_parallel=2, zero_stage=1), tmp_path / "run")
    job = begin(folder, *steps, PET_MAX_RESTARTS="1")
    wait_for_steps(folder, job, seconds=200)
    os.kill(pid_of_rank(1, folder), signal.SIGKILL)
    errors = end_of(job)
    assert job.returncode == 0, errors
    assert "going on after" in errors
    lines = lines_of(folder)
    assert len(lines) >= 24  # steps behind the checkpoint were done twice
    again = {line["step"]: line["loss"] for line in lines}
    undisturbed = write(plan(2, data_parallel=2, zero_stage=1), tmp_path / "undisturbed")
    assert launch(undisturbed, *steps, timeout=240).returncode == 0
    for line in lines_of(undisturbed):
        assert again[line["step"]] == pytest.approx(line["loss"], abs=1e-5)


def test_sigterm_saves_the_step_that_ran_and_leaves(tmp_path):
    folder = write(plan(2, pipeline_parallel=2), tmp_path / "run")
    job = begin(folder, "--steps", "100000", *FLAGS)
    wait_for_steps(folder, job, seconds=200)
    job.terminate()  # torchrun, which tells its ranks
    errors = end_of(job)
    assert "stopped by SIGTERM after step" in errors
    (saved,) = candidates(folder / FOLDER)
    assert f"saved in {folder / FOLDER}/step-{saved:08d}" in errors
    assert not (folder / FINISHED).exists()


def test_a_loss_that_is_no_number_ends_the_run_before_its_step_is_applied(tmp_path):
    folder = write(plan(1), tmp_path / "run")
    steps = ("--steps", "50", "--save-every", "1", "--keep", "0", "--warmup-steps", "0")
    failed = launch(folder, *steps, "--synthetic", "--learning-rate", "1e30", timeout=240)
    assert failed.returncode == 1
    assert "error: the loss is nan in step" in failed.stderr or (
        "error: the gradient's norm is" in failed.stderr
    )
    assert "Traceback" not in failed.stderr.partition("error:")[2].partition("torch")[0]
    done = candidates(folder / FOLDER)
    assert done[0] == len(done)  # the steps before it, and not that one


def test_a_disk_that_is_full_ends_the_run_and_leaves_no_part(tmp_path):
    folder = write(plan(1), tmp_path / "run")
    full = subprocess.run(
        ["bash", str(folder / "launch.sh"), "--steps", "3", "--save-every", "1", *FLAGS],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment(),
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)),
    )
    assert full.returncode == 1
    assert "error: cannot write the checkpoint" in full.stderr
    assert "rank 0: " in full.stderr
    assert [path.name for path in (folder / FOLDER).iterdir()] == []
    assert not (folder / FOLDER / LATEST).exists()


@pytest.mark.parametrize("kind", [Optimizer.ADAMW, Optimizer.SGD])
def test_a_gradient_that_is_no_number_changes_nothing_on_any_rank(kind):
    name, both = (
        "qwen2-untied",
        Layout(
            data_parallel=2,
            zero_group=2,
            zero_stage=1,
            micro_batch_size=4,
            num_micro_batches=4,
            layers_per_stage=(8,),
        ),
    )
    graph = lowered(name, both)

    def work(world):
        mesh, states, executor, _ = start(world, graph, both)
        settings = OptimizerSettings(kind=kind, max_norm=None)
        optimizer = ShardedOptimizer(states, settings, checks_norm=True)
        executor.run(micro_batches(MODELS[name].vocab_size, both, mesh.coordinate("dp")))
        before = [bucket.master.clone() for bucket in states.buckets]
        if world.rank == 1:
            states.buckets[0].gradients[0] = torch.nan
        try:
            optimizer.step(0)
        except NotFiniteError as error:
            same = [
                torch.equal(b.master, old) for b, old in zip(states.buckets, before, strict=True)
            ]
            return [str(error), all(same)]

    for message, is_same in run_ranks(work, 2, timeout=200):
        assert message == "the gradient's norm is nan in step 0"
        assert is_same


def test_what_a_resumed_run_does_otherwise_is_said(tmp_path):
    def record(*flags):
        return record_of_run(plan(1), parse_options(["--synthetic", *flags], tmp_path))

    assert differences(record(), record()) == []
    told = differences(record(), record("--seed", "7", "--learning-rate", "0.5"))
    assert told[0] == "seed was 0 when the checkpoint was saved, and is 7 now"
    assert [line.partition(" ")[0] for line in told] == [
        "seed",
        "learning_rate",
        "min_learning_rate",
    ]
