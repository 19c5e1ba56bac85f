"""The benchmark against hand-written torch runs, and both of its sides train alike."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "against_torch" / "against_torch.py"
LAYOUTS = ("DP2", "ZeRO-3", "TP2", "TP2 sequence", "PP2 1F1B", "DP2 x PP2")
FAST = ("ZeRO-3",)
ROUNDING = 1e-5  # relative, of losses in fp32 that are summed in another order


def run(*arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False
    )


def rows(*layouts):
    """Return the cells of each row of a run on the small model."""
    result = run("--try", "--pairs", "2", "--steps", "1", "--only", *layouts)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("| ")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def check_rows(found, layouts):
    assert [row[0] for row in found] == list(layouts)
    for name, ratio, _, _, peaks, difference in found:
        assert float(ratio) > 0, name
        assert all(float(peak) > 1 for peak in peaks.removesuffix(" MiB").split(", ")), name
        assert 0 <= float(difference) < ROUNDING, name


def test_both_sides_of_the_benchmark_have_equal_losses():
    check_rows(rows(*FAST), FAST)


@pytest.mark.matrix
def test_both_sides_of_the_benchmark_have_equal_losses_in_every_layout():
    check_rows(rows(*LAYOUTS), LAYOUTS)


@pytest.mark.matrix
def test_an_unknown_layout_is_refused_with_those_that_exist():
    result = run("--only", "DP3")
    assert result.returncode == 2
    assert "no layout 'DP3'; there are DP2, ZeRO-3" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_block_placed_over_others_ends_them():
    live_bytes = runpy.run_path(str(SCRIPT.with_name("live_storage.py")))["live_bytes"]
    blocks = [(0, 100, 50), (1, 200, 50), (2, 300, 7), (3, 140, 100), (4, 240, 10), (5, 140, -100)]
    assert [live for _, live in live_bytes(blocks)] == [50, 100, 107, 107, 117, 17]
