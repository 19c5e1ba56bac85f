"""Run any rank of a plan in one process, without its peers and without memory.

The real executor, states and optimizer run the rank's real actions; tensors are fake (shapes only)
and so is the process group, whose collectives return at once. A step of many micro-batches on a
long pipeline repeats itself: it follows exactly from a few short ones (`short_steps.py`).
"""

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from costmodels.job import TrainingJob
from costmodels.layout import Layout
from runtime.executor import Executor
from runtime.first_values import materialise
from runtime.lower import program_of
from runtime.mesh import Mesh, World
from runtime.optimizer import OptimizerSettings, ShardedOptimizer, precisions
from runtime.program import BATCH_FIELDS, Batch, ParameterShard
from runtime.short_steps import Figures, ShortStep, bytes_of, flops_of, peak_of, short_steps
from runtime.trackers import Message, Tracker
from runtime.zero import ShardedStates


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRun:
    """What one rank does in a step.

    Attributes:
        rank: Global rank.
        flops: Executed, recomputation included.
        num_bytes: By axis of the mesh (`grid.GROUP_AXES`).
        peak: Bytes of live storage at the highest point, states included.
        messages: Of the shortest step that was run, in order.

    """

    rank: int
    flops: int
    num_bytes: Counter[str]
    peak: int
    messages: tuple[Message, ...]


def dry_run(lowered: GraphModule, job: TrainingJob, layout: Layout, rank: int) -> RankRun:
    """Run one rank of a lowered plan with fake tensors.

    Args:
        lowered: From `lower_graph`; serves every rank.
        job: The plan's.
        layout: The plan's.
        rank: Which one, global.

    Raises:
        ValueError: The runtime does not train in the job's precision or with its optimizer.

    """
    with _fake_mesh(layout, rank) as mesh, FakeTensorMode(allow_non_fake_inputs=True):
        place = mesh.coordinate("pp")
        steps = short_steps(layout, place)
        found, messages = _run_steps(lowered, job, mesh, steps)
    return RankRun(
        rank=rank,
        flops=flops_of(layout, steps, found),
        num_bytes=bytes_of(layout, steps, found),
        peak=peak_of(layout, place, steps, found),
        messages=messages,
    )


@contextmanager
def _fake_mesh(layout: Layout, rank: int) -> Iterator[Mesh]:
    if dist.is_initialized():
        raise RuntimeError("a dry run needs torch.distributed for itself; it is already in use")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.num_gpus)
    try:
        world = World(torch.device("cpu"), timedelta(seconds=10), shares_groups=False)
        yield world.mesh(layout)
    finally:
        dist.destroy_process_group()


def _run_steps(
    lowered: GraphModule, job: TrainingJob, mesh: Mesh, steps: Sequence[ShortStep]
) -> tuple[list[Figures], tuple[Message, ...]]:
    """Return what was read off each step, and the messages of the first."""
    tracker = Tracker()
    found: list[Figures] = []
    messages: tuple[Message, ...] = ()
    with tracker.watching():
        program = program_of(lowered, mesh.layout, mesh)
        materialise(program, _whole_parameter)
        states = ShardedStates(program, mesh, precisions(job))
        optimizer = ShardedOptimizer(states, OptimizerSettings(kind=job.optimizer))
        _create_optimizer_states(optimizer)
        # Those of the whole step wait on the device, however few are run.
        batches = [_batch(job, mesh.layout) for _ in range(mesh.layout.num_micro_batches)]
        for step in steps:
            actions = step.actions(mesh.layout, mesh.coordinate("pp"))
            gc.collect()  # the last step's executor refers to itself; training keeps one
            tracker.flops, tracker.messages = 0, []
            tracker.reset_peak()
            Executor(replace(program, actions=actions), mesh, states).run(
                batches[: step.num_micro_batches]
            )
            optimizer.step(0)
            found.append(_read(tracker, mesh))
            messages = messages or _by_axis(tracker, mesh)
    return found, messages


def _read(tracker: Tracker, mesh: Mesh) -> Figures:
    names = _axes(mesh)
    by_group = tracker.bytes_by_group()
    return Figures(
        flops=tracker.flops,
        num_bytes=Counter({names[group]: count for group, count in by_group.items()}),
        peak=tracker.peak,
    )


def _by_axis(tracker: Tracker, mesh: Mesh) -> tuple[Message, ...]:
    """Return messages under the names of their axes, not of torch's groups."""
    names = _axes(mesh)
    return tuple(replace(message, group=names[message.group]) for message in tracker.messages)


def _axes(mesh: Mesh) -> dict[str, str]:
    return {str(g.handle.group_name): g.axis for g in mesh.groups.values() if g.handle is not None}


def _whole_parameter(shard: ParameterShard) -> Tensor:
    return torch.empty(shard.global_shape)


def _create_optimizer_states(optimizer: ShardedOptimizer) -> None:
    """Let the optimizer make its moments, which every step but the first finds in place."""
    for segment in optimizer.segments():
        segment.master.grad = torch.zeros_like(segment.master)
    optimizer.inner.step()
    for segment in optimizer.segments():
        segment.master.grad = None


def _batch(job: TrainingJob, layout: Layout) -> Batch:
    shape = (layout.micro_batch_size, job.seq_len // layout.context_parallel)
    fields = ("input_ids", "labels") if layout.context_parallel == 1 else BATCH_FIELDS
    return {name: torch.zeros(shape, dtype=torch.long) for name in fields}
