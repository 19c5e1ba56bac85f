"""Run any rank of a plan in one process, without its peers and without memory.

The real executor, states and optimizer run the rank's real actions; tensors are fake (shapes only)
and so is the process group, whose collectives return at once. A step of many micro-batches repeats
itself: it follows exactly from the actions of a few of them (`short_rows.py`).
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
from costmodels.schedule import Action
from runtime.executor import TAGS_OF_A_MICRO_BATCH, Executor
from runtime.first_values import materialise
from runtime.lower import program_of
from runtime.mesh import Mesh, World
from runtime.meter import Meter, Part
from runtime.optimizer import OptimizerSettings, ShardedOptimizer, precisions
from runtime.program import BATCH_FIELDS, Batch, ParameterShard, Program
from runtime.short_rows import Figures, RowReader, added
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
        messages: All that cross the pipeline, and the others of the micro-batches that were run,
            in order.

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
        return _run(lowered, job, mesh)


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


def _run(lowered: GraphModule, job: TrainingJob, mesh: Mesh) -> RankRun:
    tracker = Tracker()
    with tracker.watching():
        program = program_of(lowered, mesh.layout, mesh)
        materialise(program, _whole_parameter)
        states = ShardedStates(program, mesh, precisions(job))
        optimizer = ShardedOptimizer(states, OptimizerSettings(kind=job.optimizer))
        _create_optimizer_states(optimizer)
        # Those of the whole step wait on the device, however few are run.
        batches = [_batch(job, mesh.layout) for _ in range(mesh.layout.num_micro_batches)]
        states_held = tracker.live
        for row in (_short_row(mesh.layout, program.actions), program.actions):
            meter = Meter(tracker, _axes(mesh))
            Executor(replace(program, actions=row), mesh, states, trace=meter).run(batches)
            optimizer.step(0)
            meter.cut()
            run = _whole_step(program, row, meter.parts)
            if run is not None:
                break
            gc.collect()  # the executor refers to itself; training keeps one
    assert run is not None, "a row follows from itself"
    figures, messages = run
    return RankRun(
        rank=mesh.rank,
        flops=figures.flops,
        num_bytes=figures.num_bytes,
        peak=states_held + figures.rise,
        messages=messages,
    )


def _short_row(layout: Layout, whole: Sequence[Action]) -> tuple[Action, ...]:
    return RowReader(layout).short_row(whole)


def _whole_step(
    program: Program, row: Sequence[Action], parts: Sequence[Part]
) -> tuple[Figures, tuple[Message, ...]] | None:
    """Return what the whole row does; None if it does not follow from the row that was run."""
    begin, *actions, end = parts
    own, whole = [part.figures for part in actions], program.actions
    if len(row) < len(whole):
        reader = RowReader(program.layout)
        known = reader.by_situation(row, own)
        if known is None:
            return None
        own = [known[situation] for situation in reader.situations(whole)]
    figures = added([begin.figures, *own, end.figures])
    collectives = [one for part in parts for one in part.messages if one.group != "pp"]
    return figures, (*collectives, *_transfers(whole, row, actions))


def _transfers(
    whole: Sequence[Action], row: Sequence[Action], parts: Sequence[Part]
) -> Iterator[Message]:
    """Return what crosses the pipeline: a stage's messages of one kind differ in their tags."""
    known = {
        (action.stage, action.kind): (action.micro_batch, one)
        for action, part in zip(row, parts, strict=True)
        for one in part.messages
        if one.group == "pp"
    }
    for action in whole:
        if not action.is_compute:
            micro_batch, one = known[action.stage, action.kind]
            later = action.micro_batch - micro_batch
            yield replace(one, tag=one.tag + later * TAGS_OF_A_MICRO_BATCH)


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
