"""The resume matrix: random pairs of plans, from 1 to 8 ranks, of every model of the parity suite.

pytest -m matrix tests/runtime/test_resume_matrix.py
"""

import pytest
import torch
from parity_cases import MODELS, describe
from resume_cases import on_ranks, random_pair, stored_tensors, train_and_save

from runtime.checkpoint_folders import folder_of

NUM_PAIRS, STEPS, MORE = 48, 2, 3


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, marks=[] if number in (0, 1) else pytest.mark.matrix)
        for number in range(NUM_PAIRS)
    ],
)
def test_any_plan_goes_on_where_any_other_stopped(number, tmp_path):
    """Next losses within 1e-5; every tensor, saved again after loading, bit for bit."""
    name = list(MODELS)[number % len(MODELS)]
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
