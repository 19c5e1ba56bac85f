"""Parity breaks when any one exchange between ranks is left out: each axis, ZeRO, stages, experts.

`test_parity.py` does it for each collective that a dense graph names. Here also those of backward,
of states and of attention and experts, which graphs do not show: one exchange of each place in the
code that makes one.
"""

import pytest
from parity import gradient_errors, larger, weight_errors, worst
from parity_cases import RATE, TOLERANCE, dtype_of, lowered, own_batches, sgd_truth, start
from removal import Exchanges, from_json, one_of_each_site, to_json

from costmodels.layout import ContextParallelType, Layout, Recompute
from runtime.launch import run_ranks

RING, ULYSSES, GATHER = ContextParallelType
STEPS = 2  # weights that were not published show in the second


def layout(**changes):
    micro = {"micro_batch_size": 4, "num_micro_batches": 8 // changes.get("data_parallel", 1)}
    return Layout(**{"layers_per_stage": (8,), **micro, **changes})


SP = {"tensor_parallel": 2, "sequence_parallel": True}
ZERO1 = {"zero_stage": 1, "zero_group": 2}
CASES = {
    "tensor": ("qwen3-tied", layout(tensor_parallel=2)),
    "sequence": ("qwen3-tied", layout(**SP, recompute=Recompute.FULL)),
    "zero 1": ("qwen2-untied", layout(data_parallel=2, **ZERO1)),
    "zero 3": ("qwen2-untied", layout(data_parallel=2, zero_stage=3, zero_group=2)),
    "hybrid": ("qwen2-untied", layout(data_parallel=4, zero_stage=2, zero_group=2)),
    "stages": ("qwen3-tied", layout(pipeline_parallel=2, layers_per_stage=(3, 5))),
    "ring": ("qwen2-untied", layout(context_parallel=2, **ZERO1)),
    "gather": ("qwen2-untied", layout(context_parallel=2, context_parallel_type=GATHER)),
    "ulysses": ("qwen2-untied", layout(context_parallel=2, context_parallel_type=ULYSSES)),
    "experts": ("mixtral", layout(data_parallel=2, expert_parallel=2, **SP)),
    "experts, copies": ("mixtral", layout(tensor_parallel=2, expert_parallel=2)),
    "cut experts": ("mixtral", layout(data_parallel=2, expert_tensor_parallel=2)),
    "experts, ring": ("mixtral", layout(context_parallel=2, expert_parallel=2)),
    "latent experts": ("deepseek", layout(data_parallel=2, expert_parallel=2, **ZERO1)),
}
QUICK = {"stages", "ring"}  # in the default run


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in QUICK else [pytest.mark.matrix]) for case in CASES],
)
def test_leaving_any_one_exchange_out_breaks_parity(case, monkeypatch):
    name, plan = CASES[case]
    sgd_truth(name)
    graph = lowered(name, plan)

    def watch(world):
        rank = Rank(world, name, graph, plan)
        exchanges = Exchanges()
        with exchanges.watching(monkeypatch):
            error = rank.error()
        return [error, [to_json(exchange) for exchange in exchanges.seen]]

    answers = run_ranks(watch, plan.num_gpus, timeout=600)
    assert max(error for error, _ in answers) < TOLERANCE
    seen = [[from_json(exchange) for exchange in found] for _, found in answers]
    chosen = one_of_each_site(seen)

    def leave_out(world):
        rank = Rank(world, name, graph, plan)
        found = []
        for exchange in chosen:
            with Exchanges((exchange.axis, exchange.number)).watching(monkeypatch):
                found.append(rank.error())
            rank.restore()
        return [*found, rank.error()]

    *errors, whole = map(max, zip(*run_ranks(leave_out, plan.num_gpus, timeout=600), strict=True))
    assert whole < TOLERANCE
    assert len(errors) == len(chosen) >= 3
    unnoticed = [
        (error, exchange)
        for error, exchange in zip(errors, chosen, strict=True)
        if error < 10 * TOLERANCE
    ]
    assert unnoticed == []


class Rank:
    """A rank that can take the first steps again and again."""

    def __init__(self, world, name, graph, plan):
        self.name = name
        self.mesh, self.states, self.executor, _ = start(world, graph, plan, dtype_of(name))
        self.batches = own_batches(name, self.mesh)
        self.first = [bucket.master.clone() for bucket in self.states.buckets]

    def restore(self):
        self.states.wait_weights()  # they are sent from the masters that change now
        for bucket, values in zip(self.states.buckets, self.first, strict=True):
            bucket.master.copy_(values)
        self.states.clear_gradients()
        self.states.publish()

    def error(self):
        """Return the worst error of losses, gradients and weights over the first steps."""
        found = 0.0
        for truth in sgd_truth(self.name)[:STEPS]:
            loss = self.executor.run(self.batches).item()
            found = larger(found, abs(loss - truth.loss))
            found = larger(
                found, worst(gradient_errors(self.states, self.mesh, truth.gradients))[0]
            )
            for bucket in self.states.buckets:
                bucket.master.sub_(RATE * bucket.gradients)
            self.states.clear_gradients()
            self.states.publish()
            found = larger(found, worst(weight_errors(self.states, self.mesh, truth.weights))[0])
        return min(found, 1e9)  # JSON knows no infinity
