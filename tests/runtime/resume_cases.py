"""Runs that are saved under one plan and resumed under another, for the checkpoints' tests."""

import random
from functools import cache
from pathlib import Path

import torch
from parity_cases import ALL, BATCH, EXPERTS, SEQ_LEN, dtype_of, lowered, own_batches, start
from parity_space import layouts, spreads_experts
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from costmodels.job import Optimizer
from runtime.checkpoints.files import read_manifest
from runtime.checkpoints.folders import folder_of
from runtime.checkpoints.saving import Checkpoints, RunRecord, Samples
from runtime.checkpoints.sharded_state import buffers_of
from runtime.launch import run_ranks
from runtime.states.optimizer import OptimizerSettings, ShardedOptimizer

ADAMW = OptimizerSettings(kind=Optimizer.ADAMW, learning_rate=0.01, num_warmup_steps=2, num_steps=8)


class Run:
    """A rank of a run: trains, saves and loads."""

    def __init__(self, world, name, graph, layout, folder, *, settings=ADAMW, **options):
        self.mesh, self.states, self.executor, program = start(world, graph, layout, dtype_of(name))
        self.optimizer = ShardedOptimizer(self.states, settings)
        self.parts = (self.states, self.optimizer, buffers_of(program))
        self.batch = own_batches(name, self.mesh)
        samples = Samples(source="suite", seed=0, seq_len=SEQ_LEN, global_batch_size=BATCH)
        record = RunRecord(num_steps=0, model=ALL[name], optimizer=settings, samples=samples)
        group = world.host_group()
        self.checkpoints = Checkpoints(folder, self.mesh, group, record, **options)

    def train(self, first, count):
        losses = []
        for step in range(first, first + count):
            losses.append(self.executor.run(self.batch).item())
            self.optimizer.step(step)
        return losses

    def save(self, num_steps):
        self.checkpoints.save(*self.parts, num_steps)

    def load(self, folder):
        return self.checkpoints.load(folder, *self.parts).num_steps

    def load_latest(self):
        record = self.checkpoints.load_latest(*self.parts)
        return record and record.num_steps


def on_ranks(name, layout, folder, work, **options):
    """Run `work(run)` on every rank of a layout and return what each returns."""
    graph = lowered(name, layout)  # once, before the ranks fork
    return run_ranks(
        lambda world: work(Run(world, name, graph, layout, folder, **options)),
        layout.num_gpus,
        timeout=300,
    )


def train_and_save(name, layout, folder, steps, more, **options):
    """Train, save, train on; return the losses after saving."""

    def work(run):
        run.train(0, steps)
        run.save(steps)
        losses = run.train(steps, more)
        run.checkpoints.wait()
        return losses

    return on_ranks(name, layout, folder, work, **options)[0]


def resume_latest(name, layout, folder, more, **options):
    """Load the last checkpoint and train on; return the steps that were done and the losses."""

    def work(run):
        done = run.load_latest()
        return [done, run.train(done or 0, more)]

    return on_ranks(name, layout, folder, work, **options)[0]


@cache
def _plans(name, num_ranks):
    return layouts(name, num_ranks)


def random_pair(name, seed):
    """Return two different plans of a model, each on 1 to 8 ranks, from the search's space.

    One of the two spreads experts, where the model has any.
    """
    draw = random.Random(seed)  # noqa: S311  (the same pairs every time)
    while True:
        saver, loader = (draw.choice(_plans(name, draw.choice((1, 2, 4, 8)))) for _ in range(2))
        spread = name not in EXPERTS or any(map(spreads_experts, (saver, loader)))
        if saver != loader and spread:
            return saver, loader


def stored_tensors(folder: Path, num_steps: int):
    """Return every tensor of a checkpoint whole, as torch's own tools read it."""
    folder = folder_of(folder, num_steps)
    manifest = read_manifest(folder)
    whole = {
        name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
        for name, tensor in manifest.tensors.items()
    }
    load(whole, storage_reader=FileSystemReader(folder), no_dist=True)
    return whole
