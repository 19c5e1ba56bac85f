"""Run any rank of a plan in one process, without its peers and without memory.

The real executor, states and optimizer run the rank's real actions; tensors are fake (shapes only)
and so is the process group, whose collectives return at once. A step of many micro-batches repeats
itself: it follows exactly from the actions of a few of them (`short_rows.py`). What a rank has
shown of its program need not be run again on a rank of an equal one (`same_programs.py`).
"""

from collections import Counter
from collections.abc import Hashable, Iterator
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
from runtime.communication.grid import coordinates
from runtime.communication.mesh import Mesh, World
from runtime.dry_run.meter import Meter, RanRow
from runtime.dry_run.same_programs import ProgramKeys
from runtime.dry_run.short_rows import RowReader, added
from runtime.dry_run.shown_programs import Shown
from runtime.dry_run.trackers import Message, Tracker
from runtime.executor import Executor
from runtime.lower import program_of, rows_of
from runtime.program import BATCH_FIELDS, Batch, ParameterShard
from runtime.states.first_values import materialise
from runtime.states.optimizer import OptimizerSettings, ShardedOptimizer, precisions
from runtime.states.zero import ShardedStates


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRun:
    """What one rank does in a step.

    Attributes:
        rank: Global rank.
        flops: Executed, recomputation included.
        num_bytes: By axis of the mesh (`grid.GROUP_AXES`).
        peak: Bytes of live storage at the highest point, states included.
        messages: All that cross the pipeline, and the others of the micro-batches that were run.

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
    return DryRuns(lowered, job, layout).run(rank)


class DryRuns:
    """Runs ranks of one lowered plan, and of equal programs only what was not seen yet."""

    def __init__(self, lowered: GraphModule, job: TrainingJob, layout: Layout) -> None:
        """Bind a plan, as for `dry_run`."""
        self._lowered, self._job, self._layout = lowered, job, layout
        self._rows = rows_of(layout)
        self._keys = ProgramKeys(lowered, layout)
        self._shown: dict[Hashable, Shown] = {}

    def run(self, rank: int) -> RankRun:
        """Return what a rank does.

        Raises:
            ValueError: As for `dry_run`.

        """
        place = coordinates(self._layout, rank)["pp"]
        whole, reader = self._rows.actions(place), RowReader(self._layout, place)
        key = self._keys.key(rank)
        shown: Shown | None = self._shown.get(key)
        row = self.row_to_run(whole, reader, shown)
        if row:
            ran = self._run_row(rank, row)
            shown = Shown.of(ran, reader) if shown is None else shown.with_row(ran, reader)
            if shown is None:  # a situation did two things
                return _as_it_ran(rank, self._run_row(rank, whole))
            self._shown[key] = shown
        assert shown is not None, "a program of which nothing is known is run"
        figures = shown.figures(whole, reader)
        return RankRun(
            rank=rank,
            flops=figures.flops,
            num_bytes=figures.num_bytes,
            peak=shown.first.states + figures.rise,
            messages=shown.messages(self._layout, rank, whole, reader),
        )

    def row_to_run(
        self, whole: tuple[Action, ...], reader: RowReader, shown: Shown | None
    ) -> tuple[Action, ...]:
        """Return the row that shows what is not known of a program; none if all is."""
        return reader.short_row(whole, {} if shown is None else shown.situations)

    def _run_row(self, rank: int, row: tuple[Action, ...]) -> RanRow:
        with (
            _fake_mesh(self._layout, rank) as mesh,
            FakeTensorMode(allow_non_fake_inputs=True),
            Tracker().watching() as tracker,
        ):
            program = program_of(self._lowered, self._layout, mesh)
            materialise(program, _whole_parameter)
            states = ShardedStates(program, mesh, precisions(self._job))
            optimizer = ShardedOptimizer(states, OptimizerSettings(kind=self._job.optimizer))
            _create_optimizer_states(optimizer)
            for tensor in _states_on_host(states, optimizer):
                tracker.leave(tensor)
            # Those of the whole step wait on the device, however few are run.
            count = self._layout.num_micro_batches
            batches = [_batch(self._job, self._layout) for _ in range(count)]
            held = tracker.live
            meter = Meter(tracker, _axes(mesh))
            Executor(replace(program, actions=row), mesh, states, trace=meter).run(batches)
            optimizer.step(0)
            meter.cut()
        return RanRow(rank=rank, states=held, row=row, parts=tuple(meter.parts))


def _as_it_ran(rank: int, ran: RanRow) -> RankRun:
    figures = added([part.figures for part in ran.parts])
    return RankRun(
        rank=rank,
        flops=figures.flops,
        num_bytes=figures.num_bytes,
        peak=ran.states + figures.rise,
        messages=ran.messages,
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


def _states_on_host(states: ShardedStates, optimizer: ShardedOptimizer) -> Iterator[Tensor]:
    """Yield what offloading keeps in host memory; here host and device are the same."""
    for bucket in states.buckets:
        if "weights" in bucket.sharing.on_host:
            yield bucket.weights
        if "optimizer" in bucket.sharing.on_host:
            if bucket.master is not bucket.weights:
                yield bucket.master
            for segment in bucket.segments:
                yield from optimizer.inner.state[segment.master].values()


def _batch(job: TrainingJob, layout: Layout) -> Batch:
    shape = (layout.micro_batch_size, job.seq_len // layout.context_parallel)
    fields = ("input_ids", "labels") if layout.context_parallel == 1 else BATCH_FIELDS
    return {name: torch.zeros(shape, dtype=torch.long) for name in fields}
