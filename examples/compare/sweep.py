"""One sweep: many layouts in one launch, their steps interleaved, seconds of every step.

All layouts are set up first; then each round runs a few steps of one after the other, so that what
else the machine does meanwhile falls on all of them alike. The first step of a turn warms caches
up and does not count. What a step takes is what its slowest rank takes: all meet before and after.
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule

from costmodels.hardware import Cluster
from costmodels.job import TrainingJob
from costmodels.layout import Layout
from costmodels.model import ModelSpec
from runtime.communication import collectives
from runtime.communication.mesh import Mesh, World
from runtime.context import context_share
from runtime.executor import Executor
from runtime.launch import run_ranks
from runtime.lower import lower_graph, program_of
from runtime.measure.sleep_seconds import rests_of
from runtime.measure.sleeping import SleepingUpdate, put_to_sleep
from runtime.states.initialise import normal_initialiser
from runtime.states.optimizer import OptimizerSettings, ShardedOptimizer, precisions
from runtime.states.zero import ShardedStates

TIMEOUT = 1800.0  # s for a whole sweep
ROUNDS_SECONDS = 400.0  # a busy machine gets fewer rounds


class Updates(Protocol):
    """What ends a step: an optimizer, or what sleeps in its place."""

    def step(self, step: int) -> Tensor:
        """Update the weights with the step's gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What is run.

    Attributes:
        sleeps: Computation is replaced by sleeps of the length that `cluster` predicts.
        rounds: Turns of each layout; fewer if they would take longer than ROUNDS_SECONDS.
        steps: Steps of a turn that count; one more comes before them.

    """

    model: ModelSpec
    job: TrainingJob
    cluster: Cluster
    layouts: tuple[Layout, ...]
    sleeps: bool
    rounds: int
    steps: int = 2


def run_sweep(sweep: Sweep, progress: Callable[[str], None]) -> list[list[float]]:
    """Return the seconds of every counted step, by layout.

    Raises:
        RankFailedError: A rank failed; the message names it.

    """
    torch.set_num_threads(1)  # before the fork: OpenMP's threads do not survive it
    progress(f"lowering {len(sweep.layouts)} layouts")
    graphs = [lower_graph(sweep.model, sweep.job, layout) for layout in sweep.layouts]

    def work(world: World) -> list[list[float]]:
        say = progress if world.rank == 0 else _silent
        return _run(sweep, graphs, world, say)

    seconds: list[list[float]] = run_ranks(work, sweep.cluster.num_gpus, timeout=TIMEOUT)[0]
    return seconds


def _run(
    sweep: Sweep, graphs: Sequence[GraphModule], world: World, progress: Callable[[str], None]
) -> list[list[float]]:
    runs = [
        _Run(sweep, layout, graph, world)
        for layout, graph in zip(sweep.layouts, graphs, strict=True)
    ]
    gc.collect()
    gc.freeze()  # a collection would fall on whichever layout runs
    begin = time.monotonic()
    for number in range(1, sweep.rounds + 1):
        for run in runs:
            run.turn(sweep.steps)
        spent = runs[0].agree(time.monotonic() - begin)
        progress(f"round {number} of {sweep.rounds} done after {spent:.0f} s")
        if spent * (number + 1) / number > ROUNDS_SECONDS:
            break
    return [run.seconds for run in runs]


class _Run:
    """One layout on one rank.

    Attributes:
        seconds: Of the steps that count, in order.

    """

    def __init__(self, sweep: Sweep, layout: Layout, graph: GraphModule, world: World) -> None:
        self._mesh = world.mesh(layout)
        program = program_of(graph, layout, self._mesh)
        rests = None
        if sweep.sleeps:
            place = self._mesh.coordinate("pp")
            rests = rests_of(sweep.model, sweep.job, sweep.cluster, layout, place)
            put_to_sleep(program, rests)
        states = ShardedStates(
            program,
            self._mesh,
            precisions(sweep.job),
            initialise=normal_initialiser(0, sweep.model.num_layers, world.device),
        )
        self._executor = Executor(program, self._mesh, states)
        self._updates: Updates = (
            ShardedOptimizer(states, OptimizerSettings())
            if rests is None
            else SleepingUpdate(states, rests.update)
        )
        self._batches = _batches(sweep, layout, self._mesh)
        self.seconds: list[float] = []

    def turn(self, steps: int) -> None:
        """Run one step that does not count and `steps` that do."""
        self._step()
        self.seconds += [self._step() for _ in range(steps)]

    def _step(self) -> float:
        self.agree(0.0)
        start = time.perf_counter()
        self._executor.run(self._batches)
        self._updates.step(0)
        return self.agree(time.perf_counter() - start)

    def agree(self, seconds: float) -> float:
        """Return the largest of all ranks' values, after all of them came here."""
        mine = torch.tensor([seconds], dtype=torch.float64)
        return float(collectives.all_reduce(mine, self._mesh.group("world"), "max"))


def _batches(sweep: Sweep, layout: Layout, mesh: Mesh) -> list[dict[str, Tensor]]:
    """Return random tokens: what is in them does not change how long a step takes."""
    generator = torch.Generator().manual_seed(mesh.coordinate("dp"))
    shape = (layout.micro_batch_size, sweep.job.seq_len)
    batches = []
    for _ in range(layout.num_micro_batches):
        tokens = torch.randint(0, sweep.model.vocab_size, shape, generator=generator)
        whole = {"input_ids": tokens, "labels": tokens.roll(-1, 1)}
        batches.append(context_share(whole, layout, mesh.coordinate("cp")))
    return batches


def _silent(text: str) -> None:
    """Say nothing."""
