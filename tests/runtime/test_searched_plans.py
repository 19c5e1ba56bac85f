"""Whatever the search offers for the native runtime runs: plans drawn from it, lowered and run."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from costmodels.hardware import make_cluster
from costmodels.job import Precision, TrainingJob
from costmodels.layout import ContextParallelType
from costmodels.model import MixtureOfExperts, ModelSpec
from costmodels.profiles.reader import read_profile
from planner.constraints import Constraints
from planner.search.ranking import search
from runtime.capture.export import capture
from runtime.context import context_share
from runtime.executor import Executor
from runtime.launch import run_ranks
from runtime.lower import lower_captured, program_of
from runtime.models import build_model
from runtime.states.first_values import materialise
from runtime.states.initialise import normal_initialiser
from runtime.states.optimizer import OptimizerSettings, ShardedOptimizer, precisions
from runtime.states.zero import ShardedStates

MODELS = [
    ModelSpec(
        name="small-llama",
        architecture="llama",
        hidden_size=32,
        num_layers=4,
        num_attention_heads=4,
        num_kv_heads=2,
        head_dim=8,
        ffn_hidden_size=48,
        vocab_size=61,
        training_seq_len=16,
    ),
    ModelSpec(
        name="small-gpt2",
        architecture="gpt2",
        hidden_size=32,
        num_layers=6,
        num_attention_heads=4,
        num_kv_heads=4,
        head_dim=8,
        ffn_hidden_size=64,
        vocab_size=61,
        training_seq_len=16,
        gated_ffn=False,
        activation="gelu_new",
        norm="layernorm",
        tied_embeddings=True,
        num_position_embeddings=16,
        rope_theta=None,
        qkv_bias=True,
        attention_output_bias=True,
        ffn_bias=True,
    ),
    ModelSpec(
        name="small-mixtral",
        architecture="mixtral",
        hidden_size=32,
        num_layers=4,
        num_attention_heads=4,
        num_kv_heads=2,
        head_dim=8,
        ffn_hidden_size=48,
        vocab_size=61,
        training_seq_len=16,
        moe=MixtureOfExperts(num_experts=4, experts_per_token=2, ffn_hidden_size=24),
    ),
]
# What narrows each search, so that the drawn plans differ: one axis at a time, and none.
DENSE = [
    Constraints(),
    Constraints(tensor_parallel=(2, 4)),
    Constraints(pipeline_parallel=(2, 4)),
    Constraints(zero_stage=(3,)),
    Constraints(stages_per_rank=(2,)),
    *(
        Constraints(context_parallel=(2,), context_parallel_type=(kind,))
        for kind in ContextParallelType
    ),
]
EXPERTS = [
    Constraints(expert_parallel=(2,)),
    Constraints(expert_parallel=(4,), pipeline_parallel=(1,)),
    Constraints(expert_tensor_parallel=(2,)),
    Constraints(expert_parallel=(2,), context_parallel=(2,)),
    Constraints(expert_parallel=(2,), stages_per_rank=(2,)),
    Constraints(expert_parallel=(2,), tensor_parallel=(2,), zero_stage=(2, 3)),
]


def drawn(model, num_ranks):
    """Return searched layouts of a model, one for each way to narrow the search."""
    job = TrainingJob(seq_len=16, global_batch_size=16, precision=Precision.FP32)
    cluster = make_cluster(read_profile("cpu-gloo"), num_ranks)
    found = []
    for constraints in EXPERTS if model.moe else DENSE:
        result = search(model, job, cluster, replace(constraints, runnable=True), top=3)
        found += [judged.layout for judged in result.plans[-1:]]
    return job, found


@pytest.mark.parametrize("num_ranks", [4, 8])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_plans_drawn_from_the_search_run_and_learn(model, num_ranks):
    job, layouts = drawn(model, num_ranks)
    assert len(layouts) == len(EXPERTS if model.moe else DENSE)
    captured = capture(
        build_model(model, seq_len=job.seq_len, dtype=torch.float32), dtype=torch.float32
    )
    graphs = [lower_captured(copy.deepcopy(captured), job, layout) for layout in layouts]

    def work(world):
        return [losses(world, model, job, *case) for case in zip(layouts, graphs, strict=True)]

    results = run_ranks(work, num_ranks, timeout=300)
    for rank in results[1:]:
        assert rank == results[0]
    for layout, (first, *_, last) in zip(layouts, results[0], strict=True):
        assert first == pytest.approx(math.log(model.vocab_size), abs=0.2), layout
        assert last < first - 0.1, layout
    # Same seed, same data: all layouts tell one story.
    for other in results[0][1:]:
        assert other == pytest.approx(results[0][0], abs=1e-3)


def losses(world, model, job, layout, graph):
    """Train a few steps on one repeated batch."""
    mesh = world.mesh(layout)
    program = program_of(graph, layout, mesh)
    materialise(program, normal_initialiser(0, model.num_layers, world.device))
    states = ShardedStates(program, mesh, precisions(job))
    executor = Executor(program, mesh, states)
    optimizer = ShardedOptimizer(states, OptimizerSettings(learning_rate=0.02))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, model.vocab_size, (16, 17), generator=generator)
    own = tokens.chunk(layout.data_parallel)[mesh.coordinate("dp")]
    whole = [
        {"input_ids": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}
        for rows in own.split(layout.micro_batch_size)
    ]
    batch = [context_share(part, layout, mesh.coordinate("cp")) for part in whole]
    found = []
    for step in range(5):
        found.append(round(executor.run(batch).item(), 6))
        optimizer.step(step)
    return found
