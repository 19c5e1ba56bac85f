"""Programs of one lowered graph, and where they may not meet."""

import lowering_models as small
import torch

from costmodels.layout import Layout, Schedule
from runtime.executor import Executor
from runtime.launch import run_ranks
from runtime.lower import lower_graph, program_of
from runtime.split_backward import split_linear
from runtime.states.zero import Precisions, ShardedStates

SPEC = small.llama()
FORMATS = Precisions(gradients=torch.float32, master=torch.float32)
ZERO_3 = Layout(
    data_parallel=2,
    zero_stage=3,
    zero_group=2,
    num_micro_batches=2,
    layers_per_stage=(small.NUM_LAYERS,),
)


def trained(world, lowered, values):
    """Train one step of a program of its own; return the loss and its gradients."""
    mesh = world.mesh(ZERO_3)
    program = program_of(lowered, ZERO_3, mesh)
    states = ShardedStates(program, mesh, FORMATS, initialise=lambda shard: values[shard.name])
    data = small.batch(size=4)
    own = [{k: v[2 * mesh.coordinate("dp") + i][None] for k, v in data.items()} for i in range(2)]
    loss = Executor(program, mesh, states).run(own).item()
    return [loss, [bucket.gradients.tolist() for bucket in states.buckets]]


def test_a_second_program_of_a_graph_trains_as_the_first_did():
    lowered = lower_graph(SPEC, small.job(), ZERO_3)
    values = small.weights(small.plain_model(SPEC))

    def work(world):
        return [trained(world, lowered, values) for _ in range(2)]

    for first, second in run_ranks(work, 2, timeout=120):
        assert first == second


def test_hooks_and_rewrites_stay_with_their_program():
    layout = Layout(
        pipeline_parallel=2,
        schedule=Schedule.ZERO_BUBBLE,
        num_micro_batches=2,
        layers_per_stage=(small.NUM_LAYERS // 2,) * 2,
    )
    lowered = lower_graph(SPEC, small.job(), layout)
    values = small.weights(small.plain_model(SPEC))

    def work(world):
        mesh = world.mesh(layout)
        first, second = (program_of(lowered, layout, mesh) for _ in range(2))
        states = ShardedStates(first, mesh, FORMATS, initialise=lambda s: values[s.name])
        Executor(first, mesh, states)
        counts = [
            sum(node.target is split_linear for node in unit.graph.nodes)
            for program in (first, second)
            for unit in program.stages[0].units
        ]
        meta = [
            parameter.is_meta for p in (first, second) for parameter in p.stages[0].parameters()
        ]
        return [counts, meta]

    for rank, (counts, meta) in enumerate(run_ranks(work, 2, timeout=60)):
        units, parameters = len(counts) // 2, len(meta) // 2
        linears = 7 * small.NUM_LAYERS // 2 + (rank == 1)  # matrices of its layers, and the head
        assert sum(counts[:units]) == linears
        assert not any(counts[units:])
        assert not any(meta[:parameters])
        assert all(meta[parameters:])
