"""Llama-3.1-70B on 64 H100: no random legal layout is faster than the search's first."""

import random
from functools import cache

import numpy as np
import pytest

from costmodels.job import TrainingJob
from costmodels.layout import split_layers
from costmodels.profiles.reader import make_cluster, read_profile
from planner.constraints import Constraints
from planner.judge import Verdict, judge
from planner.presets import read_model
from planner.search.ranking import search
from planner.search.space import root, space_of, unfold

KEPT = 2000  # partial layouts kept, by chance, after each axis


@cache
def job_70b():
    cluster = make_cluster(read_profile("h100-sxm-80gb"), 64)
    return read_model("70b"), TrainingJob(seq_len=8192, global_batch_size=512), cluster


@cache
def rank_1():
    found = search(*job_70b(), Constraints(runnable=True), top=1)
    assert found.status == "optimal"
    return found.plans[0].time.step_seconds


def random_layouts(seed, count):
    """Legal layouts drawn axis by axis, so that every degree and choice comes up."""
    model, task, cluster = job_70b()
    space = space_of(model, task, cluster, Constraints(runnable=True))
    drawn, rng = root(space), np.random.default_rng(seed)
    for axis in space.axes.axes:
        drawn = unfold(space, drawn, axis.name)
        rows = rng.permutation(len(drawn.table))[:KEPT]
        drawn = type(drawn)(
            table=drawn.table.take(np.sort(rows)), known=drawn.known, num_axes=drawn.num_axes
        )
    table, chance = drawn.table, random.Random(seed)  # noqa: S311 - layouts, not secrets
    for row in chance.sample(range(len(table)), count):
        stages = int(table.pipeline_parallel[row] * table.stages_per_rank[row])
        split = split_layers(model.num_layers, stages)
        recomputes = table.layout(row, split, 0).recompute == "full"
        redone = chance.randrange(max(split)) if recomputes else 0
        yield table.layout(row, split, redone)


def none_is_faster(seed, count):
    """Return how many of the layouts fit."""
    fits = 0
    for layout in random_layouts(seed, count):
        said = judge(*job_70b(), layout)
        assert said.verdict is not Verdict.ILLEGAL, layout
        if said.verdict is Verdict.FITS:
            fits += 1
            assert said.time.step_seconds >= rank_1() * (1 - 1e-9), layout
    return fits


def test_none_of_100_random_layouts_is_faster_than_rank_1():
    assert none_is_faster(seed=0, count=100) > 0


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(1, 5))
def test_none_of_1000_random_layouts_is_faster_than_rank_1(seed):
    assert none_is_faster(seed, count=250) > 0
