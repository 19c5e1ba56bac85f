"""A sleeping program sends what the real one sends and sleeps as long as the cost model says."""

import copy
from dataclasses import replace

import lowering_models as small
import pytest
import torch

from costmodels.hardware import Cluster
from costmodels.layout import Layout, Recompute, Schedule, split_layers
from costmodels.profiles.reader import read_profile
from costmodels.time.estimate import estimate_time
from runtime.dry_run.trackers import Tracker
from runtime.executor import Executor
from runtime.launch import run_ranks
from runtime.lower import program_of
from runtime.measure import sleeping
from runtime.measure.sleep_seconds import Rests, rests_of
from runtime.measure.sleeping import Sleeper, SleepingUpdate, put_to_sleep
from runtime.states.initialise import normal_initialiser
from runtime.states.optimizer import OptimizerSettings, ShardedOptimizer, precisions
from runtime.states.zero import ShardedStates

MODEL, JOB = small.llama(vocab_size=104), small.job()
CPU = read_profile("cpu-gloo")


def layout(**fields):
    whole = Layout(layers_per_stage=(), num_micro_batches=2, micro_batch_size=1, **fields)
    return replace(
        whole,
        layers_per_stage=split_layers(small.NUM_LAYERS, whole.num_stages),
        zero_group=whole.data_parallel,
    )


def cluster(num_gpus=1):
    return Cluster(profile=CPU, num_gpus=num_gpus, gpus_per_node=num_gpus)


class Clock:
    """A clock that moves when somebody sleeps, a little more than asked."""

    def __init__(self, late):
        self.now, self.late, self.slept = 0.0, late, []

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds + self.late


def test_what_one_sleep_takes_too_long_the_next_makes_up_for(monkeypatch):
    clock = Clock(late=0.25)
    monkeypatch.setattr(sleeping, "time", clock)
    sleeper = Sleeper()
    for _ in range(4):
        sleeper.sleep(1.0)
    assert clock.slept == [1.0, 0.75, 0.75, 0.75]
    assert clock.now == 4.25


def test_lateness_beyond_a_whole_sleep_is_made_up_for_later(monkeypatch):
    clock = Clock(late=1.5)
    monkeypatch.setattr(sleeping, "time", clock)
    sleeper = Sleeper()
    sleeper.sleep(1.0)
    clock.late = 0.0
    sleeper.sleep(1.0)
    sleeper.sleep(1.0)
    assert clock.slept == [1.0, 0.0, 0.5]


def asleep(mesh, shape, rests, lowered=None):
    lowered = lowered or small.lowered(MODEL, JOB, shape)
    program = program_of(lowered, shape, mesh)
    put_to_sleep(program, rests)
    values = normal_initialiser(0, MODEL.num_layers, torch.device("cpu"))
    states = ShardedStates(program, mesh, precisions(JOB), initialise=values)
    return Executor(program, mesh, states), SleepingUpdate(states, rests.update)


def awake(mesh, shape, lowered):
    program = program_of(lowered, shape, mesh)
    values = normal_initialiser(0, MODEL.num_layers, torch.device("cpu"))
    states = ShardedStates(program, mesh, precisions(JOB), initialise=values)
    return Executor(program, mesh, states), ShardedOptimizer(states, OptimizerSettings())


def batches(shape):
    return [small.batch(1, seed, MODEL.vocab_size) for seed in range(shape.num_micro_batches)]


@pytest.mark.parametrize("recompute", list(Recompute))
def test_the_sleeps_of_a_lone_rank_and_its_real_work_are_the_estimated_step(monkeypatch, recompute):
    shape = layout(recompute=recompute)
    rests = rests_of(MODEL, JOB, cluster(), shape, 0)
    clock = Clock(late=0.0)
    monkeypatch.setattr(sleeping, "time", clock)
    executor, update = asleep(small.lone_mesh(shape), shape, rests)
    loss = executor.run(batches(shape))
    update.step(0)
    assert float(loss) == 0
    sustained = CPU.device.memory_bandwidth * CPU.calibration["memory_efficiency"]
    weights = sum(p.numel() for p in small.plain_model(MODEL).parameters())
    real = weights * (2 * 8 + 8) / sustained  # two micro-batches, one step
    estimate = estimate_time(MODEL, JOB, cluster(), shape).step_seconds
    slept = sum(clock.slept)
    assert slept + real + CPU.calibration["step_overhead"] == pytest.approx(estimate)
    assert slept > real


def test_full_recomputation_sleeps_again_before_every_layers_backward(monkeypatch):
    shape = layout(recompute=Recompute.FULL)
    rests = Rests(
        units={0: ((1.0, 10.0, 7.0), *[(2.0, 20.0, 1.5)] * 4, (3.0, 30.0, 7.0))}, update=500.0
    )
    clock = Clock(late=0.0)
    monkeypatch.setattr(sleeping, "time", clock)
    executor, update = asleep(small.lone_mesh(shape), shape, rests)
    executor.run(batches(shape))
    update.step(0)
    one = [1, 2, 2, 2, 2, 3, 30, 1.5, 20, 1.5, 20, 1.5, 20, 1.5, 20, 10]
    assert clock.slept == [*one, *one, 500]


LAYOUTS = (
    layout(tensor_parallel=4),
    layout(tensor_parallel=4, sequence_parallel=True, recompute=Recompute.FULL),
    layout(tensor_parallel=2, pipeline_parallel=2, sequence_parallel=True),
    layout(tensor_parallel=2, data_parallel=2, zero_stage=3),
    layout(data_parallel=2, pipeline_parallel=2, zero_stage=1, schedule=Schedule.GPIPE),
    layout(data_parallel=4, zero_stage=2, recompute=Recompute.SELECTIVE),
    layout(pipeline_parallel=2, data_parallel=2, stages_per_rank=2, schedule=Schedule.INTERLEAVED),
)


def messages(world, shape, lowered, *, sleeps):
    mesh, lowered = world.mesh(shape), copy.deepcopy(lowered)
    if sleeps:
        rank = mesh.coordinate("pp")
        units = {
            stage: ((0.0, 0.0, 0.0),) * (count + (stage == 0) + (stage == shape.num_stages - 1))
            for stage, count in enumerate(shape.layers_per_stage)
            if stage in shape.stages_of_rank(rank)
        }
        executor, optimizer = asleep(mesh, shape, Rests(units=units, update=0.0), lowered)
    else:
        executor, optimizer = awake(mesh, shape, lowered)
    with Tracker().watching() as tracker:
        executor.run(batches(shape))
        optimizer.step(0)
    return sorted(
        (m.operation, list(m.ranks), m.num_bytes, m.peer, m.tag)
        for m in tracker.messages
        if m.num_elements > 1
    )


def test_a_sleeping_program_sends_what_the_real_one_sends():
    graphs = [small.lowered(MODEL, JOB, shape) for shape in LAYOUTS]

    def work(world):
        return [
            [messages(world, shape, graph, sleeps=sleeps) for sleeps in (False, True)]
            for shape, graph in zip(LAYOUTS, graphs, strict=True)
        ]

    for rank, of_layouts in enumerate(run_ranks(work, 4, timeout=120.0)):
        for shape, (real, slept) in zip(LAYOUTS, of_layouts, strict=True):
            assert real, (rank, shape)
            assert slept == real, (rank, shape)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"context_parallel": 2}, "context_parallel = 2: only data, tensor and pipeline"),
        (
            {"pipeline_parallel": 2, "schedule": Schedule.ZERO_BUBBLE},
            "zero-bubble splits backward.*possible are gpipe, 1f1b, interleaved-1f1b",
        ),
    ],
)
def test_what_cannot_sleep_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        rests_of(MODEL, JOB, cluster(2), layout(**fields), 0)
