"""Samples of whole training steps of a tiny model: what the host does around the arithmetic.

A kernel that is called in a loop of its own finds its code and its arguments in the cache. In a
step, the graph's interpreter, autograd and the allocator come between two kernels; on a CPU that
time adds to theirs. With a tiny model it is most of the step:

    step = arithmetic + kernel_gap * kernels + step_overhead

Steps of several numbers of micro-batches tell the gap from what happens once per step. Kernels are
counted by the cost model, so that the gap belongs to its counts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal

import numpy as np
import torch
from torch.fx import GraphModule

from costmodels.estimate import estimate_time
from costmodels.hardware import HardwareProfile, make_cluster
from costmodels.job import Precision, TrainingJob
from costmodels.layout import Layout
from costmodels.model import ModelSpec
from costmodels.profile_schema import Entry
from costmodels.profile_toml import profile_from_entries
from planner.presets import read_model
from runtime.executor import Executor
from runtime.initialise import normal_initialiser
from runtime.lower import lower_graph, program_of
from runtime.measure.fitting import Found
from runtime.measure.samples import Sample, sample
from runtime.measure.stopwatch import Stopwatch
from runtime.mesh import World
from runtime.optimizer import OptimizerSettings, ShardedOptimizer, precisions
from runtime.zero import ShardedStates

MODEL = "tiny"
SEQ_LEN = 16  # chosen: so few tokens that products are a small part
MICRO_BATCHES = (1, 2, 8)
_MICROSECOND = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyJob:
    """What is trained, lowered once for all ranks."""

    model: ModelSpec
    graph: GraphModule


def tiny_job(ranks: int) -> TinyJob:
    """Return the tiny model for a number of data-parallel ranks."""
    model = read_model(MODEL)
    layout = _layout(model, ranks, 1)
    return TinyJob(model=model, graph=lower_graph(model, _job(layout), layout))


def step_samples(watch: Stopwatch, world: World, tiny: TinyJob) -> Iterator[Sample]:
    """Measure steps of the tiny model on all ranks, a sequence per micro-batch.

    Args:
        watch: Times steps; nothing is measured on GPUs, where kernels run behind the host.
        world: All ranks; each has a copy of the model.
        tiny: From `tiny_job`.

    """
    if watch.device.type != "cpu":
        return
    for num_micro_batches in MICRO_BATCHES:
        layout = _layout(tiny.model, world.size, num_micro_batches)
        mesh, job = world.mesh(layout), _job(layout)
        program = program_of(tiny.graph, layout, mesh)
        initialise = normal_initialiser(0, tiny.model.num_layers, world.device)
        states = ShardedStates(program, mesh, precisions(job), initialise=initialise)
        executor, updates = (
            Executor(program, mesh, states),
            ShardedOptimizer(states, OptimizerSettings()),
        )
        tokens = torch.arange(SEQ_LEN).unsqueeze(0)
        batches = [{"input_ids": tokens, "labels": tokens}] * num_micro_batches

        def step(
            executor: Executor = executor,
            updates: ShardedOptimizer = updates,
            batches: Sequence[Mapping[str, torch.Tensor]] = batches,
        ) -> None:
            executor.run(batches)
            updates.step(0)

        yield sample("step", "fp32", watch.seconds(step), num_micro_batches=num_micro_batches)


def fit_steps(
    samples: Sequence[Sample], entries: Mapping[str, Entry], model: ModelSpec, ranks: int
) -> list[Found]:
    """Find the gap between kernels in a graph, and what a step costs once.

    Args:
        samples: Those of "step".
        entries: The profile with all other constants measured.
        model: Of `tiny_job`.
        ranks: That measured.

    """
    runs = [s for s in samples if s.formula == "step"]
    if not runs:
        return []
    bare = _with(entries, kernel_gap=0.0, step_overhead=0.0)
    gapped = _with(entries, kernel_gap=_MICROSECOND, step_overhead=0.0)
    rows, rests = [], []
    for run in runs:
        layout = _layout(model, ranks, int(run["num_micro_batches"]))
        at_rest = _predicted(bare, model, layout)
        kernels = (_predicted(gapped, model, layout) - at_rest) / _MICROSECOND
        # Relative errors count: the long steps are as well known as the short ones.
        rows.append((kernels / run.seconds, 1 / run.seconds))
        rests.append((run.seconds - at_rest) / run.seconds)
    gap, overhead = np.linalg.lstsq(np.asarray(rows), np.asarray(rests), rcond=None)[0]
    basis = f"{len(runs)} steps of the {MODEL} model"
    least = float(str(entries["constants.kernel_gap"].value))  # of a kernel called in a loop
    return [
        Found(key="constants.kernel_gap", value=max(float(gap), least), basis=basis),
        Found(key="constants.step_overhead", value=max(float(overhead), 0.0), basis=basis),
    ]


def _predicted(profile: HardwareProfile, model: ModelSpec, layout: Layout) -> float:
    cluster = make_cluster(profile, layout.num_gpus)
    return estimate_time(model, _job(layout), cluster, layout).step_seconds


def _with(entries: Mapping[str, Entry], **constants: float) -> HardwareProfile:
    changed = dict(entries)
    for name, value in constants.items():
        key = f"constants.{name}"
        known = changed.get(key, Entry(value=0))
        changed[key] = replace(known, value=Decimal(str(value)))
    return profile_from_entries(changed, "what was measured")


def _layout(model: ModelSpec, ranks: int, num_micro_batches: int) -> Layout:
    return Layout(
        data_parallel=ranks,
        micro_batch_size=1,
        num_micro_batches=num_micro_batches,
        layers_per_stage=(model.num_layers,),
    )


def _job(layout: Layout) -> TrainingJob:
    return TrainingJob(
        seq_len=SEQ_LEN,
        global_batch_size=layout.data_parallel * layout.num_micro_batches,
        precision=Precision.FP32,
    )
