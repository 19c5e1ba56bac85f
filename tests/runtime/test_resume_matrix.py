"""The resume matrix: random pairs of plans, from 1 to 8 ranks, of every model of the parity suite,
those with experts included.

pytest -m matrix tests/runtime/test_resume_matrix.py
"""

import pytest
import torch
from parity_cases import ALL, EXPERTS, describe
from parity_space import spreads_experts
from resume_cases import on_ranks, random_pair, stored_tensors, train_and_save

from runtime.checkpoints.folders import folder_of

NUM_PAIRS, STEPS, MORE = 60, 2, 3
QUICK = (0, 1, 3, 4)  # in the default run: two dense models, both with experts


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, marks=[] if number in QUICK else pytest.mark.matrix)
        for number in range(NUM_PAIRS)
    ],
)
def test_any_plan_goes_on_where_any_other_stopped(number, tmp_path):
    """Next losses within 1e-5; every tensor, saved again after loading, bit for bit."""
    name = list(ALL)[number % len(ALL)]
    saver, loader = random_pair(name, number)
    case = f"{name}: {describe(saver)} -> {describe(loader)}"
    first, second = tmp_path / "first", tmp_path / "second"
    expected = train_and_save(name, saver, first, steps=STEPS, more=MORE)

    def work(run):
        done = run.load(folder_of(first, STEPS))
        run.save(done)
        return run.train(done, MORE)

    losses = on_ranks(name, loader, second, work)[0]
    assert losses == pytest.approx(expected, abs=1e-5), case
    there, here = stored_tensors(first, STEPS), stored_tensors(second, STEPS)
    assert there.keys() == here.keys(), case
    assert [key for key in there if not torch.equal(there[key], here[key])] == [], case


def test_pairs_with_experts_spread_them_on_one_side_at_least():
    """Otherwise their blocks would be those of dense weights."""
    numbers = [n for n in range(NUM_PAIRS) if list(ALL)[n % len(ALL)] in EXPERTS]
    pairs = [random_pair(list(ALL)[number % len(ALL)], number) for number in numbers]
    assert len(pairs) >= 20
    assert all(any(map(spreads_experts, pair)) for pair in pairs)
    degrees = [tuple((s.expert_parallel, s.expert_tensor_parallel) for s in pair) for pair in pairs]
    assert sum(saver != loader for saver, loader in degrees) >= 15
