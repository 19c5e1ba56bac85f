"""Checkpoints: any plan resumes any other's, nothing unfinished has the name of a finished one."""

import os
import signal

import pytest
import torch
from parity import piece_of
from parity_cases import MODELS, lowered, micro_batches, start

from costmodels.job import Optimizer
from costmodels.layout import Layout, Recompute, Schedule, split_layers
from runtime.launch import RankFailedError, run_ranks
from runtime.optimizer import OptimizerSettings, ShardedOptimizer
from runtime.state import (
    checkpoint_folder,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)

ADAMW = OptimizerSettings(kind=Optimizer.ADAMW, learning_rate=0.01, num_warmup_steps=2, num_steps=8)


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
]


def begin(world, name, graph, layout, settings=ADAMW):
    mesh, states, executor, _ = start(world, graph, layout)
    optimizer = ShardedOptimizer(states, settings)

    def train(steps):
        batch = micro_batches(MODELS[name].vocab_size, layout, mesh.coordinate("dp"))
        losses = []
        for step in steps:
            losses.append(executor.run(batch).item())
            optimizer.step(step)
        return losses

    return mesh, states, optimizer, train


def save_after(name, layout, folder, steps, more):
    """Train, save, train on; return the losses after saving."""
    graph = lowered(name, layout)

    def work(world):
        mesh, states, optimizer, train = begin(world, name, graph, layout)
        train(range(steps))
        save_checkpoint(folder, mesh, states, optimizer, steps)
        return train(range(steps, steps + more))

    return run_ranks(work, layout.num_gpus, timeout=120)[0]


def resume(name, layout, folder, more, settings=ADAMW):
    graph = lowered(name, layout)

    def work(world):
        mesh, states, optimizer, train = begin(world, name, graph, layout, settings)
        done = load_checkpoint(folder, mesh, states, optimizer)
        return [done, train(range(done, done + more))]

    return run_ranks(work, layout.num_gpus, timeout=120)[0]


@pytest.mark.parametrize(("saver", "loader"), PAIRS, ids=["->".join(pair) for pair in PAIRS])
def test_a_run_goes_on_under_another_plan_with_the_same_losses(saver, loader, tmp_path):
    name = "gpt2-tied" if PAIRS.index((saver, loader)) % 2 else "qwen2-untied"
    folder = tmp_path / "saved"
    expected = save_after(name, PLANS[saver], folder, steps=2, more=3)
    done, losses = resume(name, PLANS[loader], folder, more=3)
    assert done == 2
    assert losses == pytest.approx(expected, abs=1e-5)


def test_loaded_parameters_have_the_bits_that_were_saved(tmp_path):
    name, folder = "gpt2-tied", tmp_path / "saved"
    save_after(name, PLANS["tp2-dp2-zero3"], folder, steps=1, more=0)
    loads = {}
    for key in ("one", "pp2-interleaved-dp2-zero1"):
        graph = lowered(name, PLANS[key])

        def work(world, key=key, graph=graph):
            mesh, states, optimizer, _ = begin(world, name, graph, PLANS[key])
            load_checkpoint(folder, mesh, states, optimizer)
            whole = {}
            for bucket in states.buckets:
                for segment in bucket.segments:
                    shape = segment.shard.global_shape
                    at = torch.arange(int(torch.tensor(shape).prod())).view(shape)
                    at = piece_of(segment, at, mesh)
                    values = zip(at.tolist(), segment.master.tolist(), strict=True)
                    whole.setdefault(segment.shard.name, {}).update(values)
            return {
                n: sorted(v.items())
                for n, v in whole.items()
                if n.endswith(("wte.weight", "c_attn.weight"))
            }

        loads[key] = {}
        for held in run_ranks(work, PLANS[key].num_gpus, timeout=120):
            for parameter, values in held.items():
                loads[key].setdefault(parameter, {}).update(dict(values))
    assert loads["one"] == loads["pp2-interleaved-dp2-zero1"]
    assert len(loads["one"]["transformer.wte.weight"]) == 67 * 24


def test_unfinished_checkpoints_are_never_the_latest(tmp_path):
    for steps in (5, 20, 100):
        checkpoint_folder(tmp_path, steps).mkdir(parents=True)
    (tmp_path / "checkpoints" / ".step-00000200.part").mkdir()
    assert latest_checkpoint(tmp_path / "checkpoints") == checkpoint_folder(tmp_path, 100)
    assert latest_checkpoint(tmp_path / "nothing") is None


def test_a_rank_killed_while_saving_leaves_the_last_good_checkpoint(tmp_path):
    folder = tmp_path / "saved"
    expected = save_after("qwen2-untied", PLANS["one"], folder, steps=2, more=1)
    graph = lowered("qwen2-untied", PLANS["dp2-zero3"])

    def work(world):
        mesh, states, optimizer, train = begin(world, "qwen2-untied", graph, PLANS["dp2-zero3"])
        train(range(1))
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        save_checkpoint(folder, mesh, states, optimizer, 3)

    with pytest.raises(RankFailedError, match="rank 1"):
        run_ranks(work, 2, timeout=60)
    done, losses = resume("qwen2-untied", PLANS["one"], folder, more=1)
    assert done == 2
    assert losses == pytest.approx(expected, abs=1e-5)


def refused(message, name, folder, settings=ADAMW):
    with pytest.raises(RankFailedError, match=message):
        resume(name, PLANS["one"], folder, more=0, settings=settings)


def test_bad_checkpoints_are_refused_with_their_name(tmp_path):
    folder = tmp_path / "saved"
    save_after("qwen2-untied", PLANS["one"], folder, steps=1, more=0)
    refused("cannot read the checkpoint .*nowhere", "qwen2-untied", tmp_path / "nowhere")
    refused(r"has no model/transformer\.wte\.weight", "gpt2-tied", folder)
    refused(r"q_proj\.weight has shape \(32, 24\) .* model has \(128, 24\)", "qwen3-tied", folder)
    data = next(folder.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    refused("cannot read the checkpoint", "qwen2-untied", folder)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RankFailedError, match="cannot write the checkpoint"):
        save_after("qwen2-untied", PLANS["one"], tmp_path / "file" / "saved", steps=1, more=0)
