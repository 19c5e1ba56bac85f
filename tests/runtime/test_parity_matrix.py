"""The parity matrix: every layout of the search's space on up to eight ranks, hours of processors.

pytest -m matrix tests/runtime/test_parity_matrix.py --junitxml=matrix.xml
python tests/runtime/parity_table.py matrix.xml

Dense models: all layouts, those over data, tensor and plain pipelines first (`-k plain`). Models
with experts: all that spread them on up to four ranks, on eight a cover of all triples of choices
(all would be nine thousand). Parts are in the order of what they add: the first ones hold a cover
of all pairs, the next one of all triples (`-k part0` for the first of each).
"""

from functools import cache
from math import ceil

import pytest
from parity_cases import EXPERTS, MODELS
from parity_space import by_importance, is_plain, layouts, share_of_model, spreads_experts

pytestmark = pytest.mark.matrix

PLAIN_PARTS = {1: 1, 2: 1, 4: 1, 8: 4}
DENSE_PARTS = {2: 1, 4: 4, 8: 20}
EXPERT_PARTS = {2: 1, 4: 12, 8: 6}


def numbered(parts):
    return [
        pytest.param(ranks, part, id=f"{ranks}-part{part}")
        for ranks, count in parts.items()
        for part in range(count)
    ]


def part_of(cases, part, count):
    size = ceil(len(cases) / count)
    return cases[part * size : (part + 1) * size]


@cache  # every part of a model and a number of ranks takes its share of one order
def ordered(name, num_ranks, *, experts_only=False):
    found = layouts(name, num_ranks)
    if experts_only:
        found = [layout for layout in found if spreads_experts(layout)]
    return by_importance(found, experts_only=experts_only)


@pytest.mark.parametrize(("num_ranks", "part"), numbered(PLAIN_PARTS))
@pytest.mark.parametrize("name", MODELS)
def test_every_plain_layout_equals_one_process(name, num_ranks, part, equal_one_process):
    cases = [layout for layout in layouts(name, num_ranks) if is_plain(layout)]
    own = share_of_model(MODELS, name, part_of(cases, part, PLAIN_PARTS[num_ranks]))
    equal_one_process(name, num_ranks, own, timeout=1800)


@pytest.mark.parametrize(("num_ranks", "part"), numbered(DENSE_PARTS))
@pytest.mark.parametrize("name", MODELS)
def test_every_other_layout_equals_one_process(name, num_ranks, part, equal_one_process):
    covering, others = ordered(name, num_ranks)
    rest = [layout for layout in covering + others if not is_plain(layout)]
    own = share_of_model(MODELS, name, part_of(rest, part, DENSE_PARTS[num_ranks]))
    equal_one_process(name, num_ranks, own, timeout=1800)


@pytest.mark.parametrize(("num_ranks", "part"), numbered(EXPERT_PARTS))
@pytest.mark.parametrize("name", EXPERTS)
def test_every_layout_that_spreads_experts_equals_one_process(
    name, num_ranks, part, equal_one_process
):
    covering, others = ordered(name, num_ranks, experts_only=True)
    cases = covering if num_ranks == 8 else covering + others
    own = share_of_model(EXPERTS, name, part_of(cases, part, EXPERT_PARTS[num_ranks]))
    equal_one_process(name, num_ranks, own, timeout=1800)
