"""Updates against torch's own AdamW in one process; the schedule; clipping across axes."""

from dataclasses import replace

import pytest
import torch
from parity import weight_errors, worst
from toy_program import Embedding, Head, Layer, batches, build_program, initial

from costmodels.job import Optimizer, Precision, TrainingJob
from costmodels.layout import Layout, split_layers
from runtime.executor import Executor
from runtime.launch import run_ranks
from runtime.states.optimizer import (
    OptimizerSettings,
    ShardedOptimizer,
    learning_rate,
    precisions,
)
from runtime.states.zero import Precisions, ShardedStates

NUM_LAYERS = 4
FP64 = Precisions(gradients=torch.float64, master=torch.float64)
ADAMW = OptimizerSettings(
    kind=Optimizer.ADAMW,
    learning_rate=0.01,
    weight_decay=0.1,
    max_norm=0.05,
    num_warmup_steps=2,
    num_steps=4,
)


def layout(**fields):
    whole = Layout(layers_per_stage=(), num_micro_batches=2, micro_batch_size=2, **fields)
    layers = split_layers(NUM_LAYERS, whole.num_stages)
    zero_group = fields.get("zero_group", whole.data_parallel)
    return replace(whole, layers_per_stage=layers, zero_group=zero_group)


def adamw_reference(case, *, tied, steps=3):
    """Weights after each step of torch.optim.AdamW with torch's clipping, in float64."""
    embedding = Embedding()
    modules = [embedding, *map(Layer, range(NUM_LAYERS)), Head(embedding.table if tied else None)]
    named = {name: p for module in modules for name, p in module.named_parameters()}
    for name, parameter in named.items():
        parameter.data = initial(name, parameter.shape)
    groups = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=ADAMW.betas, eps=ADAMW.epsilon)
    history = []
    for step in range(steps):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for rank in range(case.data_parallel):
            for batch in batches(case, rank):
                hidden = modules[0](batch["input_ids"])
                for module in modules[1:-1]:
                    hidden = module(hidden)
                total = total + modules[-1](hidden, batch["labels"])
                count += int((batch["labels"] != -100).sum())
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(named.values(), ADAMW.max_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(ADAMW, step)
        optimizer.step()
        optimizer.zero_grad()
        history.append({name: p.detach().clone() for name, p in named.items()})
    return history


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_clipped_adamw_in_float64_equals_torch_on_every_kind_of_layout(tied):
    cases = [
        layout(data_parallel=4),
        layout(data_parallel=4, zero_stage=1),
        layout(data_parallel=4, zero_stage=2, zero_group=2),
        layout(data_parallel=4, zero_stage=3),
        layout(pipeline_parallel=4),
        layout(data_parallel=2, pipeline_parallel=2, zero_stage=3),
    ]
    references = [adamw_reference(case, tied=tied) for case in cases]

    def work(world):
        found = []
        for case, history in zip(cases, references, strict=True):
            mesh = world.mesh(case)
            program = build_program(case, mesh, tied=tied, dtype=torch.float64)
            states = ShardedStates(program, mesh, FP64)
            executor, optimizer = Executor(program, mesh, states), ShardedOptimizer(states, ADAMW)
            for step, weights in enumerate(history):
                executor.run(batches(case, mesh.coordinate("dp")))
                optimizer.step(step)
                found.append(worst(weight_errors(states, mesh, weights))[0])
        return found

    for errors in run_ranks(work, 4):
        assert len(errors) == 3 * len(cases)
        assert max(errors) < 1e-9, errors


def test_bf16_weights_follow_their_fp32_masters():
    def work(world):
        case = layout(data_parallel=2, zero_stage=1)
        mesh = world.mesh(case)
        program = build_program(case, mesh, tied=False, dtype=torch.bfloat16)
        job = TrainingJob(seq_len=5, global_batch_size=8)
        states = ShardedStates(program, mesh, precisions(job))
        executor, optimizer = Executor(program, mesh, states), ShardedOptimizer(states, ADAMW)
        losses = []
        for step in range(4):
            losses.append(float(executor.run(batches(case, mesh.coordinate("dp")))))
            optimizer.step(step)
        masters = torch.cat([b.master for b in states.buckets])
        weights = torch.cat([b.full[: len(b.full) // 2] for b in states.buckets])
        mine = weights if mesh.coordinate("dp") == 0 else masters.bfloat16()
        return [
            str(masters.dtype),
            str(weights.dtype),
            losses,
            torch.equal(mine, masters.bfloat16()),
        ]

    for masters, weights, losses, equal in run_ranks(work, 2):
        assert (masters, weights) == ("torch.float32", "torch.bfloat16")
        assert equal
        assert losses[-1] < losses[0]


def test_states_take_the_formats_of_the_job():
    job = TrainingJob(seq_len=8, global_batch_size=8)
    assert precisions(job) == Precisions(gradients=torch.float32, master=torch.float32)
    plain = replace(job, optimizer=Optimizer.ADAMW_BF16, grad_dtype="bf16")
    assert precisions(plain) == Precisions(gradients=torch.bfloat16, master=torch.bfloat16)


def test_formats_that_the_runtime_lacks_are_refused_by_name():
    job = TrainingJob(seq_len=8, global_batch_size=8)
    with pytest.raises(ValueError, match="trains in bf16, fp32, not fp8"):
        precisions(replace(job, precision=Precision.FP8))
    with pytest.raises(ValueError, match="not adamw-8bit"):
        precisions(replace(job, optimizer=Optimizer.ADAMW_8BIT))


def test_learning_rate_climbs_linearly_then_falls_along_half_a_cosine():
    settings = OptimizerSettings(
        learning_rate=1.0, min_learning_rate=0.2, num_warmup_steps=4, num_steps=14
    )
    assert learning_rate(settings, 0) == 0.25
    assert learning_rate(settings, 3) == 1.0
    assert learning_rate(settings, 9) == pytest.approx(0.6)  # half way: the mean of both ends
    assert learning_rate(settings, 14) == pytest.approx(0.2)
    assert learning_rate(settings, 1000) == pytest.approx(0.2)
    assert learning_rate(OptimizerSettings(learning_rate=0.5), 77) == 0.5
