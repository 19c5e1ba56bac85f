"""A capacity drops the same choices under every layout: those a loop over tokens would drop."""

import math

import lowering_models as small
import pytest
import torch
from parity import larger, piece_of
from test_train import launch, lines_of, plan, write
from torch.nn import functional

from costmodels.layout import ContextParallelType, Layout, Recompute
from costmodels.model import MixtureOfExperts
from runtime.context import context_share
from runtime.executor import Executor
from runtime.launch import run_ranks
from runtime.lower import program_of
from runtime.models.feed_forward import RoutedFeedForward
from runtime.ops.capacity import capacity_of
from runtime.states.zero import Precisions, ShardedStates
from runtime.training.data import share_of
from runtime.training.dropped_shares import DroppedShares

TOLERANCE = 1e-5
BATCH, FACTOR = 8, 0.75
MOE = MixtureOfExperts(num_experts=4, experts_per_token=2, ffn_hidden_size=16)
SPEC = small.llama(name="small-mixtral", architecture="mixtral", moe=MOE)
LAYOUTS = [
    {"data_parallel": 4, "expert_parallel": 4},
    {"data_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2},
    {"tensor_parallel": 2, "pipeline_parallel": 2, "expert_tensor_parallel": 2},
    {"context_parallel": 4, "expert_parallel": 2, "recompute": Recompute.FULL},
    {
        "context_parallel": 2,
        "data_parallel": 2,
        "context_parallel_type": ContextParallelType.ULYSSES,
        "expert_parallel": 2,
        "recompute": Recompute.FULL,
        "recompute_layers": 1,
    },
    {"context_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True},
]


def layout_of(facts):
    stages, degree = facts.get("pipeline_parallel", 1), facts.get("data_parallel", 1)
    return Layout(
        **{
            "zero_group": degree * facts.get("context_parallel", 1),
            "micro_batch_size": 2,
            "num_micro_batches": BATCH // degree // 2,
            "layers_per_stage": (small.NUM_LAYERS // stages,) * stages,
            **facts,
        }
    )


class Loop(torch.nn.Module):
    """A block of experts, token by token, that stops at the capacity."""

    def __init__(self, block, counts):
        super().__init__()
        self.block, self.counts = block, counts

    def forward(self, x):
        block, moe = self.block, self.block.moe
        capacity = math.ceil(FACTOR * x.shape[1] * moe.experts_per_token / moe.num_experts)
        scores = (x @ block.gate.weight.t()).softmax(-1)
        found = []
        for sequence, of_sequence in zip(x, scores, strict=True):
            taken = [0] * moe.num_experts
            for token, score in zip(sequence, of_sequence, strict=True):
                weights, experts = score.topk(moe.experts_per_token)
                weights = weights / weights.sum()
                answer = torch.zeros_like(token)
                for weight, expert in zip(weights, experts.tolist(), strict=True):
                    self.counts[1] += 1
                    if taken[expert] == capacity:
                        self.counts[0] += 1
                        continue
                    taken[expert] += 1
                    gate, up = (block.experts.gate_up_proj[expert] @ token).chunk(2)
                    inner = functional.silu(gate) * up
                    answer = answer + weight * (block.experts.down_proj[expert] @ inner)
                found.append(answer)
        return torch.stack(found).view(x.shape)


def by_loops(values, data):
    """Return loss, gradients and dropped share of the whole batch in one process, in fp64."""
    model, counts = small.plain_model(SPEC).double(), [0, 0]
    for name, parameter in model.named_parameters():
        parameter.data = values[name].double()
    named = dict(model.named_parameters())
    for path, module in list(model.named_modules()):
        if isinstance(module, RoutedFeedForward):
            owner, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(owner), leaf, Loop(module, counts))
    positions = torch.arange(small.SEQ).expand(BATCH, -1)
    logits = model(input_ids=data["input_ids"], position_ids=positions)
    labels = data["labels"].flatten()
    loss = functional.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in named.items()}
    return loss.item(), gradients, counts[0] / counts[1]


def run_of(world, case):
    lowered, layout, values, data, truth = case
    mesh = world.mesh(layout)
    program = program_of(lowered, layout, mesh)
    dtypes = Precisions(gradients=torch.float32, master=torch.float32)
    states = ShardedStates(program, mesh, dtypes, initialise=lambda shard: values[shard.name])
    shares = DroppedShares(program, mesh)
    share = share_of(BATCH, layout.data_parallel, mesh.coordinate("dp"))
    batches = [
        context_share({k: v[i : i + 2] for k, v in data.items()}, layout, mesh.coordinate("cp"))
        for i in range(share.start, share.stop, 2)
    ]
    loss = Executor(program, mesh, states).run(batches).item()
    worst = 0.0
    for bucket in states.buckets:
        for segment in bucket.segments:
            whole = truth[segment.shard.name]
            error = (bucket.gradients[segment.place] - piece_of(segment, whole, mesh)).abs().max()
            worst = larger(worst, float(error) / max(float(whole.abs().max()), 1e-3))
    return [loss, worst, shares.step(), shares.step()]


@pytest.mark.parametrize(
    ("factor", "num_choices", "num_experts", "taken"),
    [
        (1.0, 32, 4, 8),
        (0.75, 32, 4, 6),
        (1.25, 30, 4, 10),  # 9.375
        (1.1, 200, 4, 55),  # exactly 55; 1.1 * 200 / 4 is a little more in binary
        (1e-05, 32, 4, 1),
    ],
)
def test_an_expert_takes_the_factor_times_its_share_rounded_up(
    factor, num_choices, num_experts, taken
):
    assert capacity_of(factor, num_choices, num_experts) == taken


def test_every_layout_drops_what_a_loop_over_tokens_drops():
    values = small.weights(small.plain_model(SPEC), scale=0.3)
    data = small.batch(size=BATCH)
    loss, gradients, dropped = by_loops(values, data)
    assert 0.1 < dropped < 0.5
    cases = []
    for facts in LAYOUTS:
        layout = layout_of(facts)
        lowered = small.lowered(SPEC, small.job(), layout, capacity_factor=FACTOR)
        cases.append((lowered, layout, values, data, gradients))

    def work(world):
        return [run_of(world, case) for case in cases]

    for rank in run_ranks(work, 4, timeout=300):
        for facts, (got, worst, share, again) in zip(LAYOUTS, rank, strict=True):
            assert got == pytest.approx(loss, rel=TOLERANCE), facts
            assert worst < TOLERANCE, facts
            assert share == pytest.approx(dropped, rel=1e-9), facts
            assert again == 0


def test_a_limit_that_no_expert_reaches_drops_nothing():
    values, data = small.weights(small.plain_model(SPEC), scale=0.3), small.batch(size=BATCH)
    layout = layout_of({})
    losses, shares = [], []
    for factor in (0.0, 100.0):
        lowered = small.lowered(SPEC, small.job(), layout, capacity_factor=factor)
        case = (lowered, layout, values, data, values)  # gradients are not looked at
        ((loss, _, share, _),) = run_ranks(lambda world, case=case: run_of(world, case), 1)
        losses.append(loss)
        shares.append(share)
    assert losses[0] == losses[1]
    assert shares == [0, 0]


def test_train_logs_the_share_that_it_drops(tmp_path):
    moe = {"changes": {"architecture": "mixtral", "moe": MOE}}
    folder = write(plan(2, data_parallel=2, expert_parallel=2, **moe), tmp_path / "run")
    done = launch(folder, "--steps", "2", "--synthetic", "--capacity-factor", "0.5")
    assert done.returncode == 0, done.stderr
    shares = [line["dropped_share"] for line in lines_of(folder)]
    assert len(shares) == 2
    assert all(0.4 < share < 1 for share in shares)
