"""What the search relies on when it recomputes the fewest layers that fit: more never saves time.

The law holds for whole steps, on layouts of random problems: every schedule, ZeRO stage, target.
Links are slow, so that what is reduced once per step looks for computation to hide behind.
"""

import random
from dataclasses import replace
from itertools import islice, pairwise

import pytest
from random_problems import cuts, layouts, random_problem

from costmodels.hardware import make_cluster
from costmodels.layout import Recompute
from costmodels.layout_table import table_of
from costmodels.profiles.reader import read_profile
from costmodels.time.estimate import step_seconds
from costmodels.time.layouts import layout_costs
from planner.rules import legal_mask

LAYOUTS_PER_PROBLEM = 12
ROUNDING = 1e-12
FOUND = (14752, 20289)  # an estimate that hides reductions behind recomputation breaks it there
SLOW_LINKS = ("links.intra_node.gb_per_s=20", "links.inter_node.gb_per_s=5")


def slow_problem(seed):
    problem = random_problem(seed)
    cluster, profile = problem.cluster, read_profile("h100-sxm-80gb", SLOW_LINKS)
    return replace(problem, cluster=make_cluster(profile, cluster.num_gpus, cluster.gpus_per_node))


def in_full_recomputation(problem, rng):
    """Some pipelines of a problem that recompute and reduce, each with one of its splits."""
    inputs = (problem.model, problem.job, problem.cluster)
    tried = [
        one
        for one in layouts(problem)
        if one.recompute is Recompute.FULL and one.pipeline_parallel > 1 < one.data_parallel
    ]
    if not tried:
        return
    legal, _ = legal_mask(*inputs, table_of(tried))
    legal_ones = [one for one, obeys in zip(tried, legal, strict=True) if obeys]
    for plain in rng.sample(legal_ones, min(len(legal_ones), LAYOUTS_PER_PROBLEM)):
        splits = list(islice(cuts(problem.model.num_layers, plain.num_stages), 40))
        yield replace(plain, layers_per_stage=rng.choice(splits))


def seconds_by_layers(problem, layout):
    """Seconds of a step with 1, 2, ... recomputed layers per stage."""
    inputs = (problem.model, problem.job, problem.cluster)
    costs = layout_costs(*inputs, table_of([layout]))
    counts = range(1, max(layout.layers_per_stage) + 1)
    return [step_seconds(*inputs, replace(layout, recompute_layers=n), costs) for n in counts]


@pytest.mark.parametrize("seed", [*FOUND, *range(20000, 20040)])
def test_recomputing_one_layer_more_never_makes_a_step_faster(seed):
    problem = slow_problem(seed)
    for layout in in_full_recomputation(problem, random.Random(seed)):  # noqa: S311 - a sample
        for fewer, more in pairwise(seconds_by_layers(problem, layout)):
            assert more >= fewer * (1 - ROUNDING), layout
