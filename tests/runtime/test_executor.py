"""Executor and states against plain torch, on a hand-made program and real gloo ranks."""

from dataclasses import replace

import pytest
import torch
from parity import gradient_errors, sgd_step, weight_errors, worst
from toy_program import Embedding, Head, Layer, batches, build_program, initial

from costmodels.job import Optimizer
from costmodels.layout import Layout, Offload, Recompute, Schedule, split_layers
from runtime.communication import collectives
from runtime.communication.pending import Done
from runtime.executor import Executor
from runtime.launch import run_ranks
from runtime.states.optimizer import OptimizerSettings, ShardedOptimizer
from runtime.states.zero import Precisions, ShardedStates

NUM_LAYERS, RATE = 8, 0.5
SGD = OptimizerSettings(kind=Optimizer.SGD, learning_rate=RATE, weight_decay=0.0, max_norm=None)
FP32 = Precisions(gradients=torch.float32, master=torch.float32)


def layout(**fields):
    whole = Layout(layers_per_stage=(), num_micro_batches=4, micro_batch_size=2, **fields)
    data = whole.data_parallel
    return replace(
        whole,
        layers_per_stage=split_layers(NUM_LAYERS, whole.num_stages),
        zero_group=fields.get("zero_group", data),
    )


def reference(layout, *, tied, steps=3):
    """Losses, gradients and weights of each step in one process, over the whole batch."""
    torch.manual_seed(0)
    embedding = Embedding()
    modules = [embedding, *map(Layer, range(NUM_LAYERS)), Head(embedding.table if tied else None)]
    named = {name: p for module in modules for name, p in module.named_parameters()}
    for name, parameter in named.items():
        parameter.data = initial(name, parameter.shape).float()
    history = []
    for _ in range(steps):
        total, count = torch.zeros(()), 0
        for rank in range(layout.data_parallel):
            for batch in batches(layout, rank):
                hidden = modules[0](batch["input_ids"])
                for module in modules[1:-1]:
                    hidden = module(hidden)
                total = total + modules[-1](hidden, batch["labels"])
                count += int((batch["labels"] != -100).sum())
        loss = total / count
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in named.items()}
        norm = torch.stack([g.norm() for g in gradients.values()]).norm()
        sgd_step(named.values(), RATE)
        weights = {name: p.detach().clone() for name, p in named.items()}
        history.append((loss.item(), gradients, weights, norm.item()))
    return history


def errors_of(world, layout, history, *, tied, bucket_bytes):
    mesh = world.mesh(layout)
    program = build_program(layout, mesh, tied=tied)
    states = ShardedStates(program, mesh, FP32, bucket_bytes=bucket_bytes)
    executor = Executor(program, mesh, states)
    optimizer = ShardedOptimizer(states, SGD)
    found = []
    for step, (loss, gradients, weights, norm) in enumerate(history):
        got = executor.run(batches(layout, mesh.coordinate("dp")))
        gradient = worst(gradient_errors(states, mesh, gradients))
        got_norm = optimizer.step(step)
        found.append(
            {
                "loss": abs(float(got) - loss),
                "gradient": gradient[0],
                "norm": abs(float(got_norm) - norm) / norm,
                "weight": worst(weight_errors(states, mesh, weights))[0],
            }
        )
    return found


LAYOUTS = {
    1: [layout(), layout(offload=tuple(Offload), zero_stage=3, recompute=Recompute.FULL)],
    2: [
        layout(data_parallel=2, zero_stage=stage, recompute=recompute)
        for stage in range(4)
        for recompute in (Recompute.NONE, Recompute.FULL)
    ]
    + [
        layout(data_parallel=2, zero_stage=1, offload=(Offload.OPTIMIZER,)),
        layout(data_parallel=2, zero_stage=3, offload=tuple(Offload)),
        layout(pipeline_parallel=2, schedule=Schedule.ZERO_BUBBLE),
        layout(pipeline_parallel=2, stages_per_rank=2, schedule=Schedule.ZBV),
        layout(pipeline_parallel=2, stages_per_rank=2, schedule=Schedule.DUALPIPEV),
        layout(pipeline_parallel=2, schedule=Schedule.GPIPE),
        layout(pipeline_parallel=2),
        layout(pipeline_parallel=2, stages_per_rank=2, schedule=Schedule.INTERLEAVED),
    ],
    4: [
        layout(data_parallel=4, zero_stage=stage, zero_group=group)
        for stage in range(4)
        for group in (2, 4)
    ]
    + [layout(data_parallel=2, pipeline_parallel=2, zero_stage=stage) for stage in range(4)]
    + [
        layout(pipeline_parallel=4),
        layout(pipeline_parallel=4, schedule=Schedule.ZERO_BUBBLE, recompute=Recompute.FULL),
        *(
            layout(
                pipeline_parallel=2,
                data_parallel=2,
                stages_per_rank=2,
                schedule=schedule,
                zero_stage=stage,
            )
            for schedule in (Schedule.ZERO_BUBBLE, Schedule.ZBV, Schedule.DUALPIPEV)
            for stage in range(4)
        ),
        layout(
            pipeline_parallel=2,
            data_parallel=2,
            zero_stage=3,
            stages_per_rank=2,
            schedule=Schedule.INTERLEAVED,
            recompute=Recompute.FULL,
        ),
    ],
}


@pytest.mark.parametrize("num_ranks", LAYOUTS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_three_sgd_steps_equal_one_process_for_every_layout(num_ranks, tied):
    cases = [(case, reference(case, tied=tied)) for case in LAYOUTS[num_ranks]]

    def work(world):
        return [
            errors_of(world, case, history, tied=tied, bucket_bytes=bucket_bytes)
            for case, history in cases
            for bucket_bytes in (1, 1 << 20)
        ]

    for results in run_ranks(work, num_ranks, timeout=120):
        assert len(results) == 2 * len(cases)
        for steps, case in zip(results, [c for c, _ in cases for _ in range(2)], strict=True):
            for step in steps:
                assert max(step.values()) < 1e-5, (case, steps)


@pytest.mark.parametrize(
    ("skipped", "case", "tied"),
    [
        ("dp_cp", layout(data_parallel=4), False),
        ("zero", layout(data_parallel=4, zero_stage=1), False),
        ("zero", layout(data_parallel=4, zero_stage=3), False),
        ("zero_replicas", layout(data_parallel=4, zero_stage=2, zero_group=2), False),
        ("ends", layout(pipeline_parallel=4), True),
    ],
)
def test_a_missing_gradient_sum_breaks_parity(skipped, case, tied, monkeypatch):
    history = reference(case, tied=tied)
    start_all_reduce = collectives.start_all_reduce

    def reduce_all_but_one(x, group, op="sum"):
        return Done(x) if group.axis == skipped else start_all_reduce(x, group, op)

    def scatter_without_sum(full, group):
        return Done(full.chunk(group.size)[group.index].clone())

    monkeypatch.setattr(collectives, "start_all_reduce", reduce_all_but_one)
    if skipped == "zero":
        monkeypatch.setattr(collectives, "start_reduce_scatter", scatter_without_sum)
    results = run_ranks(lambda world: errors_of(world, case, history, tied=tied, bucket_bytes=1), 4)
    assert max(step["gradient"] for steps in results for step in steps) > 1e-2


def test_zero_3_holds_whole_weights_only_while_a_unit_runs():
    case = layout(data_parallel=2, zero_stage=3, recompute=Recompute.FULL)

    def work(world):
        mesh = world.mesh(case)
        program = build_program(case, mesh, tied=False)
        states = ShardedStates(program, mesh, FP32)
        sizes = []

        def count(*_):
            sizes.append(sum(b.full.untyped_storage().nbytes() > 0 for b in states.buckets))

        idle = sum(b.full.untyped_storage().nbytes() for b in states.buckets)
        for unit in program.stages[0].units:
            unit.register_forward_pre_hook(count)
        Executor(program, mesh, states).run(batches(case, mesh.coordinate("dp")))
        after = sum(b.full.untyped_storage().nbytes() for b in states.buckets)
        return [idle, after, max(sizes), len(sizes)]

    micro_batches, units, recomputed = 4, NUM_LAYERS + 2, NUM_LAYERS
    expected = [0, 0, 2, micro_batches * (units + recomputed)]
    assert run_ranks(work, 2) == [expected, expected]


def test_each_step_weighs_tokens_by_its_own_count():
    case = layout()

    def gradients_of(world, steps):
        mesh = world.mesh(case)
        program = build_program(case, mesh, tied=False)
        states = ShardedStates(program, mesh, FP32)
        executor = Executor(program, mesh, states)
        for step in steps:
            states.clear_gradients()
            executor.run(step)
        return torch.cat([bucket.gradients for bucket in states.buckets]).tolist()

    def work(world):
        many = batches(case, 0)
        few = [{**batch, "labels": batch["labels"].clone()} for batch in many]
        for batch in few:
            batch["labels"][:, 1:] = -100
        return [gradients_of(world, [many, few]), gradients_of(world, [few])]

    ((after_another, alone),) = run_ranks(work, 1)
    assert after_another == alone
    assert any(alone)
