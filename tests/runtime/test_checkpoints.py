"""Checkpoints: any plan resumes any other's, nothing unfinished has the name of a finished one."""

import os
import resource
import shutil
import signal
from dataclasses import replace

import pytest
import torch
from parity_cases import MODELS
from resume_cases import on_ranks, resume_latest, stored_tensors, train_and_save

from costmodels.job import Optimizer
from costmodels.layout import Layout, Recompute, Schedule, split_layers
from runtime.checkpoints.files import MANIFEST, read_manifest
from runtime.checkpoints.folders import LATEST, candidates, folder_of, step_name
from runtime.launch import RankFailedError
from runtime.states.optimizer import OptimizerSettings


def layout(**fields):
    stages = fields.get("pipeline_parallel", 1) * fields.get("stages_per_rank", 1)
    data = fields.get("data_parallel", 1)
    return Layout(
        micro_batch_size=4,
        num_micro_batches=8 // data,
        layers_per_stage=split_layers(8, stages),
        **{"zero_group": data, **fields},
    )


PLANS = {
    "one": layout(),
    "tp2-sp": layout(tensor_parallel=2, sequence_parallel=True),
    "pp2": layout(pipeline_parallel=2),
    "dp2-zero3": layout(data_parallel=2, zero_stage=3, recompute=Recompute.FULL),
    "dp4-zero1": layout(data_parallel=4, zero_stage=1),
    "hsdp": layout(data_parallel=4, zero_stage=2, zero_group=2),
    "tp2-dp2-zero3": layout(tensor_parallel=2, data_parallel=2, zero_stage=3),
    "pp2-interleaved-dp2-zero1": layout(
        pipeline_parallel=2,
        stages_per_rank=2,
        schedule=Schedule.INTERLEAVED,
        data_parallel=2,
        zero_stage=1,
    ),
    "zbv": layout(pipeline_parallel=2, stages_per_rank=2, schedule=Schedule.ZBV),
}
PAIRS = [
    ("one", "tp2-dp2-zero3"),
    ("tp2-sp", "pp2-interleaved-dp2-zero1"),
    ("pp2", "hsdp"),
    ("dp2-zero3", "one"),
    ("dp4-zero1", "tp2-sp"),
    ("hsdp", "dp2-zero3"),
    ("tp2-dp2-zero3", "pp2"),
    ("pp2-interleaved-dp2-zero1", "dp4-zero1"),
    ("one", "zbv"),  # one rank holds both ends, and with them a tied embedding twice
    ("zbv", "tp2-sp"),
]
ONE, NAME = PLANS["one"], "qwen2-untied"


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("saver", "loader"), PAIRS, ids=["->".join(pair) for pair in PAIRS])
def test_a_run_goes_on_under_another_plan_with_the_same_losses(saver, loader, tmp_path):
    is_odd = PAIRS.index((saver, loader)) % 2 == 1
    name = "gpt2-tied" if is_odd or "zbv" in (saver, loader) else NAME
    expected = train_and_save(name, PLANS[saver], tmp_path, steps=2, more=3)
    done, losses = resume_latest(name, PLANS[loader], tmp_path, more=3)
    assert done == 2
    assert losses == pytest.approx(expected, abs=1e-5)


def test_what_is_loaded_and_saved_again_has_the_same_bits(tmp_path):
    name, first, second = "gpt2-tied", tmp_path / "first", tmp_path / "second"
    train_and_save(name, PLANS["tp2-dp2-zero3"], first, steps=2, more=0)

    def work(run):
        run.load(first / step_name(2))
        run.save(2)

    on_ranks(name, PLANS["pp2-interleaved-dp2-zero1"], second, work)
    there, here = stored_tensors(first, 2), stored_tensors(second, 2)
    assert there.keys() == here.keys()
    assert {name.partition("/")[0] for name in there} == {"model", "exp_avg", "exp_avg_sq"}
    assert there["model/transformer.wte.weight"].shape == (67, 24)
    for key, values in there.items():
        assert torch.equal(values, here[key]), key
        assert values.abs().max() > 0, key


def test_a_checkpoint_holds_the_weights_that_were_trained(tmp_path):
    """Against the states of the run itself: one rank without ZeRO holds everything."""

    def work(run):
        run.train(0, 2)
        run.save(2)
        held = {s.shard.name: s.master.view(s.shard.global_shape) for s in run.optimizer.segments()}
        stored = stored_tensors(tmp_path, 2)
        return [
            name for name, value in held.items() if not torch.equal(value, stored[f"model/{name}"])
        ]

    assert on_ranks(NAME, ONE, tmp_path, work)[0] == []


def test_bf16_weights_keep_their_fp32_masters_and_sgd_keeps_no_moments(tmp_path):
    sgd = OptimizerSettings(kind=Optimizer.SGD, learning_rate=0.1)
    expected = train_and_save(NAME, PLANS["pp2"], tmp_path, steps=1, more=2, settings=sgd)
    manifest = read_manifest(folder_of(tmp_path, 1))
    assert {key.partition("/")[0] for key in manifest.tensors} == {"model"}
    done, losses = resume_latest(NAME, PLANS["dp2-zero3"], tmp_path, more=2, settings=sgd)
    assert (done, losses) == (1, pytest.approx(expected, abs=1e-5))


def test_saving_in_the_background_stores_the_step_it_was_asked_for(tmp_path):
    """Training goes on while files are written, and must not be seen in them."""
    options = {"in_background": True}
    expected = train_and_save(NAME, PLANS["dp2-zero3"], tmp_path, steps=2, more=3, **options)
    done, losses = resume_latest(NAME, PLANS["tp2-sp"], tmp_path, more=3)
    assert (done, losses) == (2, pytest.approx(expected, abs=1e-5))


def test_the_last_ones_are_kept_and_the_last_is_pointed_at(tmp_path):
    def work(run):
        for step in (1, 2, 3, 10):
            run.save(step)

    on_ranks(NAME, PLANS["pp2"], tmp_path, work, keep=2)
    assert names_in(tmp_path) == [LATEST, "step-00000003", "step-00000010"]
    assert (tmp_path / LATEST).read_text() == "step-00000010\n"
    assert candidates(tmp_path) == [10, 3]


def test_saving_a_step_again_replaces_it_and_leaves_nothing_behind(tmp_path):
    def work(run):
        run.save(1)
        run.train(0, 1)
        run.save(1)

    on_ranks(NAME, ONE, tmp_path, work)
    assert names_in(tmp_path) == [LATEST, "step-00000001"]
    assert "exp_avg/model.norm.weight" in read_manifest(tmp_path / "step-00000001").tensors


def whole(folder, *steps):
    for step in steps:
        (folder / step_name(step)).mkdir(parents=True)
        (folder / step_name(step) / MANIFEST).write_text("{}")


def test_unfinished_checkpoints_are_never_candidates(tmp_path):
    whole(tmp_path, 5, 20, 100)
    (tmp_path / ".step-00000200.part").mkdir()
    (tmp_path / ".step-00000200.part" / MANIFEST).write_text("{}")
    (tmp_path / "step-00000300").mkdir()  # no manifest
    (tmp_path / "step-later").mkdir()
    assert candidates(tmp_path) == [100, 20, 5]
    assert candidates(tmp_path / "nowhere") == []


def test_a_pointer_that_was_set_back_is_followed(tmp_path):
    whole(tmp_path, 5, 20, 100)
    (tmp_path / LATEST).write_text("step-00000020\n")
    assert candidates(tmp_path) == [20, 5, 100]
    (tmp_path / LATEST).write_text("step-00000021\n")
    assert candidates(tmp_path) == [100, 20, 5]
    (tmp_path / LATEST).write_text("anything")
    assert candidates(tmp_path) == [100, 20, 5]


def test_a_checkpoint_that_is_being_replaced_still_counts(tmp_path):
    whole(tmp_path, 5, 20)
    (tmp_path / "step-00000020").rename(tmp_path / "step-00000020.old")
    assert candidates(tmp_path) == [20, 5]
    assert folder_of(tmp_path, 20).name == "step-00000020.old"


# What goes wrong.


def test_a_rank_killed_while_saving_leaves_the_last_good_checkpoint(tmp_path):
    expected = train_and_save(NAME, ONE, tmp_path, steps=2, more=1)

    def work(run):
        run.train(0, 1)
        if run.mesh.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        run.save(3)

    with pytest.raises(RankFailedError, match="rank 1"):
        on_ranks(NAME, PLANS["dp2-zero3"], tmp_path, work)
    assert list(tmp_path.glob(".step-*.part"))
    done, losses = resume_latest(NAME, ONE, tmp_path, more=1)
    assert (done, losses) == (2, pytest.approx(expected, abs=1e-5))


@pytest.mark.parametrize("in_background", [False, True], ids=["at-once", "in-background"])
def test_a_full_disk_ends_all_ranks_with_a_message_and_keeps_the_last_good(in_background, tmp_path):
    def work(run):
        run.save(1)
        run.checkpoints.wait()
        if run.mesh.rank == 1:  # no file may grow beyond this: as on a disk that is full
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        try:
            run.save(2)
            run.checkpoints.wait()
        except ValueError as error:
            return str(error)

    told = on_ranks(NAME, PLANS["pp2"], tmp_path, work, in_background=in_background)
    for message in told:
        assert message.startswith(f"cannot write the checkpoint {tmp_path / step_name(2)}: rank 1:")
        assert "File too large" in message
    assert names_in(tmp_path) == [LATEST, "step-00000001"]


def test_a_folder_that_cannot_be_made_ends_all_ranks_with_a_message(tmp_path):
    (tmp_path / "file").write_text("")

    def work(run):
        try:
            run.save(1)
        except ValueError as error:
            return str(error)

    told = on_ranks(NAME, PLANS["pp2"], tmp_path / "file", work)
    assert "Not a directory" in told[0] or "File exists" in told[0]
    assert all(message.startswith("cannot write the checkpoint") for message in told)


def flip_a_bit(folder):
    """Damage the middle of a checkpoint's largest file."""
    path = max(folder.glob("*.distcp"), key=lambda file: file.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut_in_half(folder):
    path = next(folder.glob("*.distcp"))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def remove_a_file(folder):
    next(folder.glob("*.distcp")).unlink()


def cut_the_manifest(folder):
    path = folder / MANIFEST
    path.write_bytes(path.read_bytes()[:1000])


DAMAGES = (flip_a_bit, cut_in_half, remove_a_file, cut_the_manifest)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")

    def work(run):
        for step in (1, 2):
            run.train(step - 1, 1)
            run.save(step)

    on_ranks(NAME, PLANS["pp2"], folder, work)
    return folder


@pytest.mark.parametrize("damage", DAMAGES, ids=[damage.__name__ for damage in DAMAGES])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(saved, damage, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    damage(folder / step_name(2))

    def work(run):
        try:
            run.load(folder / step_name(2))
        except ValueError as error:
            return [str(error), run.load_latest()]

    for message, done in on_ranks(NAME, PLANS["dp2-zero3"], folder, work):
        assert step_name(2) in message
        assert done == 1


def test_a_run_without_checkpoints_begins_anew(tmp_path):
    assert resume_latest(NAME, ONE, tmp_path, more=0) == [None, []]


def refused(message, name, folder, **options):
    def work(run):
        run.load(folder / step_name(2))

    with pytest.raises(RankFailedError, match=message):
        on_ranks(name, ONE, folder, work, **options)


def test_a_checkpoint_of_another_model_or_optimizer_is_refused(saved, tmp_path):
    refused("there is no checkpoint in .*step-00000002", NAME, tmp_path)
    refused(
        "another model than gpt2-tied: architecture is qwen2 there and gpt2", "gpt2-tied", saved
    )
    assert MODELS["qwen3-tied"].head_dim == 16
    refused("head_dim is 4 there and 16 here", "qwen3-tied", saved)


def test_moments_that_are_missing_are_refused(tmp_path):
    sgd = OptimizerSettings(kind=Optimizer.SGD)
    train_and_save(NAME, ONE, tmp_path, steps=2, more=0, settings=sgd)
    refused("has no exp_avg/.*it holds model, of another model or optimizer", NAME, tmp_path)


def test_a_manifest_cannot_send_a_reader_to_other_folders(saved, tmp_path):
    folder = tmp_path / step_name(2)
    shutil.copytree(saved / step_name(2), folder)
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace("__0_0.distcp", "../__0_0.distcp"))
    with pytest.raises(ValueError, match="is no file of the checkpoint's folder"):
        read_manifest(folder)
    (folder / MANIFEST).write_text(text.replace('"schema": 1', '"schema": 7'))
    with pytest.raises(ValueError, match="schema 7; this version reads 1"):
        read_manifest(folder)


def test_plans_of_the_suite_differ_in_every_axis():
    assert len({replace(plan, micro_batch_size=1) for plan in PLANS.values()}) == len(PLANS)
