"""What hides communication: the passes that run beside it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.time.overlap import passes_beside

degrees = st.integers(1, 16)


def test_one_stage_per_rank_hides_states_behind_one_micro_batch():
    assert passes_beside(1, 8, 64) == 1


def test_interleaved_stages_hide_states_behind_the_turns_of_the_others():
    # Four stages on each of 8 ranks: the states of three are moved while the next takes its turn
    # of 8 micro-batches, those of the last beside its own: (1 + 3 * 8) / 4 passes of all layers.
    assert passes_beside(4, 8, 64) == pytest.approx(6.25)


def test_a_turn_has_no_more_micro_batches_than_the_step():
    assert passes_beside(4, 8, 2) == pytest.approx((1 + 3 * 2) / 4)


@given(degrees, degrees, degrees)
def test_more_stages_or_micro_batches_never_hide_less(stages, ranks, micro_batches):
    here = passes_beside(stages, ranks, micro_batches)
    assert 1 <= here <= passes_beside(stages + 1, ranks, micro_batches) + 1e-12
    assert here <= passes_beside(stages, ranks, micro_batches + 1) + 1e-12
