"""Whole runs by train.py beside plain torch: a person's module, and routers that are corrected."""

import json
import shutil

import plain_modules
import pytest
import torch
from plain_modules import LENGTH, PlainGpt
from resume_cases import stored_tensors
from test_train import launch, lines_of, plan, write
from torch.nn import functional

from costmodels.model import MixtureOfExperts
from planner.emit.native import emit_native
from runtime.any_module.modules import build_module
from runtime.program import ParameterShard
from runtime.states.optimizer import OptimizerSettings, learning_rate
from runtime.training.data import SyntheticStream, micro_batches

STEPS, BATCH = 4, 8
SETTINGS = OptimizerSettings(
    learning_rate=0.01, min_learning_rate=0.001, num_warmup_steps=2, num_steps=STEPS
)
FLAGS = ("--steps", str(STEPS), "--learning-rate", "0.01", "--warmup-steps", "2", "--synthetic")


def write_module_run(folder, reference, **layout):
    built = build_module(reference)
    given = plan(2, model=built.describe().spec, seq_len=LENGTH, **layout)
    folder.mkdir()
    for file in emit_native(given, reference).files:
        (folder / file.path).write_text(file.text)
    return folder


def losses_of_plain_torch(reference):
    """Return the losses of the module with the same first values, samples and updates."""
    model, built = PlainGpt(), build_module(reference)
    for name, parameter in model.named_parameters():
        shard = ParameterShard(name=name, global_shape=tuple(parameter.shape))
        parameter.data = built.values(shard)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=SETTINGS.betas, eps=SETTINGS.epsilon)
    losses = []
    for step in range(STEPS):
        (batch,) = micro_batches(
            SyntheticStream(vocab_size=model.out.out_features),
            seed=0,
            step=step,
            sequences=range(BATCH),
            micro_batch_size=BATCH,
            seq_len=LENGTH,
            device=torch.device("cpu"),
        )
        logits = model(batch["input_ids"]).flatten(0, 1)
        loss = functional.cross_entropy(logits, batch["labels"].flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(SETTINGS, step)
        optimizer.step()
    return losses


def test_a_traced_module_trains_to_the_losses_of_plain_torch(tmp_path):
    reference = "plain_modules:plain_gpt"
    shutil.copy(plain_modules.__file__, tmp_path)  # the folder in which the run starts
    folder = write_module_run(tmp_path / "run", reference, data_parallel=2, zero_stage=1)
    done = launch(folder, *FLAGS)
    assert done.returncode == 0, done.stderr
    losses = [line["loss"] for line in lines_of(folder)]
    assert losses == pytest.approx(losses_of_plain_torch(reference), abs=1e-5)


RATE = 2**-10  # a power of two: sums of it are exact, and small enough for loads to stay uneven


def corrected_run(folder, num_ranks, **layout):
    """Return the lines of a run whose routers are corrected, and the tensors that it saved."""
    moe = MixtureOfExperts(
        num_experts=4,
        experts_per_token=2,
        ffn_hidden_size=16,
        scoring="sigmoid",
        correction_bias=True,
    )
    changes = {"architecture": "deepseek_v3", "num_kv_heads": 4, "moe": moe}
    write(plan(num_ranks, changes=changes, **layout), folder)
    flags = ("--bias-update-rate", str(RATE), "--save-every", str(STEPS))
    done = launch(folder, *FLAGS, *flags)
    assert done.returncode == 0, done.stderr
    return lines_of(folder), stored_tensors(folder / "checkpoints", STEPS)


def test_routers_are_corrected_alike_on_one_rank_and_with_experts_spread(tmp_path):
    lines, stored = corrected_run(tmp_path / "one", 1)
    spread, also = corrected_run(tmp_path / "two", 2, data_parallel=2, expert_parallel=2)
    names = [name for name in stored if name.endswith("e_score_correction_bias")]
    assert len(names) == 4
    for name in names:
        moves = stored[name] / RATE
        assert torch.equal(moves, moves.round())
        assert 0 < moves.abs().max() <= STEPS
        assert torch.equal(stored[name], also[name])
    for one, two in zip(lines, spread, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], abs=1e-5), json.dumps(two)
        assert two["expert_imbalance"] == pytest.approx(one["expert_imbalance"], abs=1e-6)
    assert lines[0]["expert_imbalance"] > 0
