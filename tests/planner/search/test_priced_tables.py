"""Layouts that are priced together against the same ones priced alone."""

from itertools import islice

import numpy as np
import pytest
from random_problems import layouts, random_problem

from costmodels.layout_table import table_of
from costmodels.memory.estimate import estimate_memory
from costmodels.time.estimate import estimate_time
from planner.rules import legal_mask
from planner.search.priced import PricedTable

MOST_LAYOUTS = 60


@pytest.mark.parametrize("seed", range(30000, 30020))
def test_layouts_priced_together_are_what_each_is_alone(seed):
    problem = random_problem(seed)
    inputs = (problem.model, problem.job, problem.cluster)
    tried = list(layouts(problem))
    legal, _ = legal_mask(*inputs, table_of(tried))
    table = table_of(
        list(islice((one for one, obeys in zip(tried, legal, strict=True) if obeys), MOST_LAYOUTS))
    )
    priced = PricedTable(
        model=problem.model,
        job=problem.job,
        cluster=problem.cluster,
        table=table,
        least_recomputed=np.arange(len(table)),
    )
    if not len(table):
        return  # no layout of this problem is legal
    others = priced.take(np.arange(len(table))[::-1])
    assert others.least_recomputed.tolist() == sorted(range(len(table)), reverse=True)
    for row in range(len(table)):
        one = priced.layout(row)
        taken = others.layout(len(table) - 1 - row)
        assert taken.layout == one.layout
        assert taken.seconds(taken.layout) == pytest.approx(one.seconds(one.layout), rel=1e-12)
        alone = estimate_memory(*inputs, one.layout)
        assert one.memory(one.layout).reserved == pytest.approx(alone.parts.reserved, rel=1e-12)
        assert one.memory(one.layout).host_per_node == pytest.approx(alone.host_per_node)
        seconds = estimate_time(*inputs, one.layout).step_seconds
        assert one.seconds(one.layout) == pytest.approx(seconds, rel=1e-9)
