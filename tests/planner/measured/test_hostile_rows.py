"""Cells of measured rows that hold no number of theirs: the row says so, the others stand."""

import pytest

from planner.measured.columns import UnsupportedRowError, integer


@pytest.mark.parametrize("text", ["1e400", "nan", "-inf", "1.5", "x"])
def test_a_cell_that_is_no_whole_number_makes_its_row_unsupported(text):
    with pytest.raises(UnsupportedRowError, match="gpus is"):
        integer({"gpus": text}, "gpus")


def test_whole_numbers_may_be_written_as_fractions():
    assert integer({"gpus": "64.0"}, "gpus") == 64
