"""Run any rank of a plan in one process, without its peers and without memory.

The real executor, states and optimizer run the rank's real actions; tensors are fake (shapes only)
and so is the process group, whose collectives return at once. A step of many micro-batches repeats
itself: two short steps that differ by a few micro-batches are run, and what those add is
multiplied. That is exact for FLOPs and bytes, and for the peak, which either no longer grows
(1F1B) or grows by the same amount with each micro-batch (GPipe).
"""

import gc
from collections import Counter
from collections.abc import Iterator
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
from costmodels.layout import Layout, Schedule
from runtime.executor import Executor
from runtime.first_values import materialise
from runtime.lower import actions_of, program_of
from runtime.mesh import Mesh, World
from runtime.optimizer import OptimizerSettings, ShardedOptimizer, precisions
from runtime.program import BATCH_FIELDS, Batch, ParameterShard
from runtime.trackers import Message, Tracker
from runtime.zero import ShardedStates

# Their steady state is reached with one micro-batch more than stages, and repeats with each.
_EVERY_MICRO_BATCH = (Schedule.GPIPE, Schedule.ONE_F_ONE_B)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
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
    first, second = _short_steps(layout)
    with _fake_mesh(layout, rank) as mesh, FakeTensorMode(allow_non_fake_inputs=True):
        steps = _run_steps(lowered, job, mesh, (first, second))
    short, long = steps
    repeats, remainder = divmod(layout.num_micro_batches - second, max(second - first, 1))
    assert remainder == 0, f"{layout.num_micro_batches} micro-batches do not follow from {second}"
    num_bytes = {
        axis: count + repeats * (count - short.num_bytes[axis])
        for axis, count in long.num_bytes.items()
    }
    return RankRun(
        rank=rank,
        flops=long.flops + repeats * (long.flops - short.flops),
        num_bytes=Counter(num_bytes),
        peak=long.peak + repeats * (long.peak - short.peak),
        messages=short.messages,
    )


def _short_steps(layout: Layout) -> tuple[int, int]:
    """Return two numbers of micro-batches from which the plan's own follows."""
    count, stages = layout.num_micro_batches, layout.pipeline_parallel
    stride = 1 if layout.schedule in _EVERY_MICRO_BATCH or stages == 1 else stages
    first = stages + 1 if stride == 1 else 2 * stages
    first += (count - first) % stride
    return (first, first + stride) if first + stride < count else (count, count)


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
    lowered: GraphModule, job: TrainingJob, mesh: Mesh, counts: tuple[int, int]
) -> list[_Step]:
    tracker = Tracker()
    with tracker.watching():
        program = program_of(lowered, mesh.layout, mesh)
        materialise(program, _whole_parameter)
        states = ShardedStates(program, mesh, precisions(job))
        optimizer = ShardedOptimizer(states, OptimizerSettings(kind=job.optimizer))
        _create_optimizer_states(optimizer)
        steps: list[_Step] = []
        for count in counts:
            if steps and count == counts[0]:
                return steps * 2
            layout = replace(mesh.layout, num_micro_batches=count)
            actions = actions_of(layout, mesh.coordinate("pp"))
            batches = [_batch(job, layout) for _ in range(count)]
            gc.collect()  # the last step's executor refers to itself; training keeps one
            tracker.flops, tracker.messages = 0, []
            tracker.reset_peak()
            Executor(replace(program, actions=actions), mesh, states).run(batches)
            optimizer.step(0)
            steps.append(_read(tracker, mesh))
    return steps


def _read(tracker: Tracker, mesh: Mesh) -> _Step:
    names = {str(g.handle.group_name): g.axis for g in mesh.groups.values() if g.handle is not None}
    by_group = tracker.bytes_by_group()
    return _Step(
        flops=tracker.flops,
        num_bytes=Counter({names[group]: count for group, count in by_group.items()}),
        peak=tracker.peak,
        messages=tuple(tracker.messages),
    )


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
