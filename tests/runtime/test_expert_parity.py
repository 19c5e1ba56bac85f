"""Layouts that spread experts compute what one process computes, balance loss included.

Models: softmax top-k on plain attention in fp32; sigmoid scores with a correction and groups, dense
first layers, an always-on expert and latent attention in fp64. Every pair of choices with an
expert axis occurs on up to four ranks; test_parity_matrix.py runs more.
"""

import pytest
import torch
from parity import gradient_errors, worst
from parity_cases import EXPERTS, TOLERANCE, lowered, own_batches, sgd_truth, start
from parity_space import cost, cover, layouts, share_of_model

from costmodels.layout import Layout
from runtime.communication import collectives
from runtime.launch import run_ranks
from runtime.ops import traffic


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("name", EXPERTS)
def test_layouts_that_cover_every_pair_with_experts_equal_one_process(
    name, num_ranks, equal_one_process
):
    candidates = layouts(name, num_ranks)
    cases = cover(candidates, experts_only=True) if num_ranks > 1 else candidates[:4]
    equal_one_process(
        name, num_ranks, share_of_model(EXPERTS, name, cases) if num_ranks > 2 else cases
    )


@pytest.mark.parametrize("name", ["mixtral", pytest.param("deepseek", marks=pytest.mark.matrix)])
def test_some_layouts_of_eight_ranks_with_experts_equal_one_process(name, equal_one_process):
    quick = [layout for layout in cover(layouts(name, 8), experts_only=True) if cost(layout) <= 16]
    equal_one_process(name, 8, share_of_model(EXPERTS, name, quick)[::4])


SPREAD = Layout(
    data_parallel=2,
    tensor_parallel=2,
    expert_parallel=2,
    sequence_parallel=True,
    micro_batch_size=4,
    num_micro_batches=4,
    layers_per_stage=(8,),
)
CUT = Layout(
    data_parallel=2,
    expert_tensor_parallel=2,
    micro_batch_size=4,
    num_micro_batches=4,
    layers_per_stage=(8,),
)


def own_rows(x, mesh, axis, output_sizes, input_sizes):
    """Keep what would be sent, in the shape of what would arrive."""
    del mesh, axis, input_sizes
    return x.new_zeros((sum(output_sizes), *x.shape[1:])) + 0 * x.sum()


def own_copies(x, mesh, axis, dim):
    return torch.cat([x] * mesh.size(axis), dim)


def own_part(x, mesh, axis, dim):
    return x.chunk(mesh.size(axis), dim)[mesh.coordinate(axis)].contiguous()


def without(monkeypatch, what):
    """Take one exchange out of what experts do."""
    real_all_reduce = collectives.start_all_reduce

    def skipping(x, group, op="sum"):
        return collectives.Done(x) if group.axis == what else real_all_reduce(x, group, op)

    match what:
        case "all_to_all":
            rows = collectives.all_to_all
            monkeypatch.setattr(
                collectives,
                what,
                lambda x, *rest: rows(x, *rest) if x.dim() == 1 else own_rows(x, *rest),
            )
        case "all_gather":
            monkeypatch.setattr(collectives, what, own_copies)
        case "reduce_scatter":
            monkeypatch.setattr(collectives, what, own_part)
        case "edp":
            monkeypatch.setattr(collectives, "start_all_reduce", skipping)


@pytest.mark.parametrize(
    ("layout", "what"),
    [
        (SPREAD, "all_to_all"),
        (SPREAD, "edp"),
        (CUT, "all_gather"),
        (CUT, "reduce_scatter"),
    ],
)
def test_taking_one_exchange_of_experts_out_breaks_parity(layout, what, monkeypatch):
    name = "mixtral"
    truth = sgd_truth(name)[0]
    graph = lowered(name, layout)

    def work(world):
        mesh, states, executor, _ = start(world, graph, layout)
        found = []
        for broken in (False, True):
            with monkeypatch.context() as patch:
                if broken:
                    without(patch, what)
                loss = executor.run(own_batches(name, mesh)).item()
            gradient, _ = worst(gradient_errors(states, mesh, truth.gradients))
            states.clear_gradients()
            found.append(max(abs(loss - truth.loss), gradient))
        return found

    errors = run_ranks(work, layout.num_gpus, timeout=300)
    assert max(whole for whole, _ in errors) < TOLERANCE
    assert max(broken for _, broken in errors) > 100 * TOLERANCE


def test_a_dry_run_takes_equal_shares():
    assert traffic._equal_shares(10, 4) == [3, 3, 2, 2]
