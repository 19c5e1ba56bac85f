"""Every layout that the runtime supports computes what one process computes.

Three steps from the same weights and data: loss, every gradient and every update within 1e-5 (of
the tensor's largest entry) in fp32 under SGD, weights within 1e-9 in float64 under AdamW. One
launch runs many layouts. The default run takes layouts in which every pair of choices occurs;
`pytest -m matrix tests/runtime/test_parity.py` runs them all.
"""

import pytest
import torch
from parity import weight_errors, worst
from parity_cases import (
    MODELS,
    STEPS,
    build_reference,
    describe,
    layouts,
    lowered,
    micro_batches,
    pairwise,
    reference_loss,
    sgd_errors,
    sgd_truth,
    start,
)
from torch.nn import functional

from costmodels.job import Optimizer
from costmodels.layout import Layout
from runtime import collectives
from runtime.launch import run_ranks
from runtime.optimizer import OptimizerSettings, ShardedOptimizer, learning_rate
from runtime.program import IGNORED_LABEL

TOLERANCE = 1e-5
LAUNCH = 25  # layouts of one launch: graphs of more would crowd the memory of small machines


def check(name, num_ranks, cases):
    for first in range(0, len(cases), LAUNCH):
        part = cases[first : first + LAUNCH]
        sgd_truth(name)
        graphs = [lowered(name, layout) for layout in part]

        def work(world, part=part, graphs=graphs):
            return [
                sgd_errors(world, name, graph, layout)
                for layout, graph in zip(part, graphs, strict=True)
            ]

        results = run_ranks(work, num_ranks, timeout=600)
        for rank, errors in enumerate(results):
            assert len(errors) == len(part)
            for layout, kinds in zip(part, errors, strict=True):
                assert max(kinds.values()) < TOLERANCE, (rank, describe(layout), kinds)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_layouts_that_cover_every_pair_of_choices_equal_one_process(name, num_ranks):
    cases = pairwise(layouts(name, num_ranks))
    assert cases
    check(name, num_ranks, cases[: 40 // num_ranks])


@pytest.mark.matrix
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_every_layout_of_the_space_equals_one_process(name, num_ranks):
    check(name, num_ranks, layouts(name, num_ranks))
