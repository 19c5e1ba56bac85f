"""Every layout that the runtime supports computes what one process computes.

Three steps from the same weights and data: loss, every gradient and every update within 1e-5 (of
the tensor's largest entry) in fp32 under SGD, weights within 1e-9 in float64 under AdamW. One
launch runs many layouts. Here every pair of choices occurs on up to four ranks, and a few layouts
have eight; test_parity_matrix.py runs them all.
"""

import pytest
import torch
from parity import gradient_errors, weight_errors, worst
from parity_cases import (
    MODELS,
    STEPS,
    TOLERANCE,
    build_reference,
    describe,
    lowered,
    micro_batches,
    own_batches,
    reference_loss,
    sgd_truth,
    start,
)
from parity_space import cost, cover, layouts, share_of_model
from torch.nn import functional

from costmodels.job import Optimizer
from costmodels.layout import Layout, Schedule
from runtime.communication import collectives
from runtime.launch import run_ranks
from runtime.ops import vocab_parallel
from runtime.program import IGNORED_LABEL
from runtime.states.optimizer import OptimizerSettings, ShardedOptimizer, learning_rate


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_layouts_that_cover_every_pair_of_choices_equal_one_process(
    name, num_ranks, equal_one_process
):
    equal_one_process(
        name, num_ranks, share_of_model(MODELS, name, cover(layouts(name, num_ranks)))
    )


def test_some_layouts_of_eight_ranks_equal_one_process(equal_one_process):
    quick = [layout for layout in cover(layouts("qwen3-tied", 8)) if cost(layout) <= 8]
    equal_one_process("qwen3-tied", 8, quick[::8])


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zero-bubble", "zbv", "dualpipev"])
def test_a_lighter_last_of_several_stages_equals_one_process(schedule, equal_one_process):
    """The search lets the last stage give up layers where the head is heavy; these models' is not.

    ZeRO-1 and tied ends, so that states and a shared matrix cross stages of several lengths.
    """
    layout = Layout(
        data_parallel=2,
        pipeline_parallel=2,
        stages_per_rank=2,
        schedule=Schedule(schedule),
        zero_stage=1,
        zero_group=2,
        micro_batch_size=4,
        num_micro_batches=4,
        layers_per_stage=(2, 2, 3, 1),
    )
    equal_one_process("qwen3-tied", 4, [layout])


def test_adamw_in_float64_equals_torch_within_1e_9():
    name, num_ranks = "qwen2-untied", 4
    cases = cover(layouts(name, num_ranks))[::4]
    graphs = [lowered(name, layout, torch.float64) for layout in cases]
    truths = adamw_truth(name)

    def work(world):
        return [
            adamw_error(world, name, graph, layout, truths)
            for layout, graph in zip(cases, graphs, strict=True)
        ]

    for errors in run_ranks(work, num_ranks, timeout=300):
        assert len(errors) == len(cases)
        for layout, error in zip(cases, errors, strict=True):
            assert error < 1e-9, (describe(layout), error)


ADAMW = OptimizerSettings(
    kind=Optimizer.ADAMW, learning_rate=0.01, num_warmup_steps=2, num_steps=4, max_norm=0.5
)


def adamw_truth(name):
    """Return the weights after each step of torch's AdamW with torch's clipping."""
    module, named = build_reference(name, torch.float64)
    groups = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=ADAMW.betas, eps=ADAMW.epsilon)
    history = []
    for step in range(STEPS):
        reference_loss(module, MODELS[name].vocab_size).backward()
        torch.nn.utils.clip_grad_norm_(named.values(), ADAMW.max_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(ADAMW, step)
        optimizer.step()
        optimizer.zero_grad()
        history.append({key: p.detach().clone() for key, p in named.items()})
    return history


def adamw_error(world, name, graph, layout, truths):
    mesh, states, executor, _ = start(world, graph, layout, torch.float64)
    optimizer = ShardedOptimizer(states, ADAMW)
    found = 0.0
    for step, weights in enumerate(truths):
        executor.run(own_batches(name, mesh))
        optimizer.step(step)
        found = max(found, worst(weight_errors(states, mesh, weights))[0])
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp-sp"])
def test_removing_any_one_collective_from_the_graph_breaks_parity(sequence_parallel):
    name = "qwen3-tied"
    layout = Layout(
        tensor_parallel=2,
        sequence_parallel=sequence_parallel,
        micro_batch_size=8,
        num_micro_batches=4,
        layers_per_stage=(8,),
    )
    graph = lowered(name, layout)
    sgd_truth(name)

    def work(world):
        mesh, states, executor, program = start(world, graph, layout)
        batch = micro_batches(MODELS[name].vocab_size, layout, 0)
        truth = sgd_truth(name)[0]

        def error():
            loss = executor.run(batch).item()
            gradient, _ = worst(gradient_errors(states, mesh, truth.gradients))
            states.clear_gradients()
            return max(abs(loss - truth.loss), gradient)

        found = {"whole": error()}
        for unit, spec in zip(program.stages[0].units, program.stages[0].specs, strict=True):
            for node in collective_nodes(unit):
                kept, node.target = node.target, LOCAL[node.target.__name__]
                unit.recompile()
                found[f"{spec.name} {node.name}"] = error()
                node.target = kept
                unit.recompile()
        found["restored"] = error()
        return found

    whole, restored = "whole", "restored"
    results = run_ranks(work, 2, timeout=300)
    # A rank sees its own pieces; a missing sum may spoil only the other's.
    errors = {key: max(result[key] for result in results) for key in results[0]}
    assert errors.pop(whole) < TOLERANCE
    assert errors.pop(restored) < TOLERANCE
    assert len(errors) == 8 * 4 + 4  # four in each layer, two in the embedding, two in the head
    assert min(errors.values()) > 100 * TOLERANCE, errors


def collective_nodes(unit):
    return [
        node
        for node in unit.graph.nodes
        if node.op == "call_function" and getattr(node.target, "__module__", "") in MODULES
    ]


MODULES = (collectives.__name__, vocab_parallel.__name__)


def _nothing(x, *_):
    return x


def _own_copies(x, mesh, axis, dim):
    return torch.cat([x] * mesh.size(axis), dim)


def _own_part(x, mesh, axis, dim):
    return x.chunk(mesh.size(axis), dim)[mesh.coordinate(axis)].contiguous()


def _own_rows(weight, ids, *_):
    return functional.embedding(ids.clamp(max=weight.shape[0] - 1), weight)


def _own_columns(logits, labels, *_):
    labels = labels.clamp(max=logits.shape[-1] - 1)
    return functional.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")


# What is left of each collective when its exchange is taken out: the shapes.
LOCAL = {
    "copy_to": _nothing,
    "reduce_from": _nothing,
    "all_gather": _own_copies,
    "reduce_scatter": _own_part,
    "vocab_parallel_embedding": _own_rows,
    "vocab_parallel_cross_entropy": _own_columns,
}
