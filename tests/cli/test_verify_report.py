"""What `planner verify` prints of a role: which figure differs, and by how much."""

import pytest

from costmodels.units import GIB, MIB
from planner.cli.verify import _role_lines
from runtime.verify import Pair, RoleReport


def lines_of(num_bytes, peak):
    """Return the lines without the spaces that align them."""
    report = RoleReport(
        ranks=(0, 1),
        flops=Pair(graph=7e12, estimate=7e12),
        num_bytes=(("dp", num_bytes),),
        live_peak=peak,
    )
    return [" ".join(line.split()) for line in _role_lines(report)]


def test_only_figures_that_differ_are_marked():
    assert lines_of(Pair(graph=5, estimate=4), Pair(graph=100 * MIB, estimate=94 * MIB)) == [
        "FLOPs 7,000,000,000,000 in the graph, 7,000,000,000,000 estimated",
        "bytes dp 5 in the graph, 4 estimated DIFFER",
        "live peak 100.00 MiB in the graph, 94.00 MiB estimated (-6.0 %) DIFFER",
    ]


@pytest.mark.parametrize(
    ("estimate", "words"),
    [
        (2.08, "2.08 GiB estimated (+4.0 %)"),
        (1.92, "1.92 GiB estimated (-4.0 %)"),
        (2.12, "2.12 GiB estimated (+6.0 %) DIFFER"),
    ],
)
def test_peaks_within_five_percent_agree(estimate, words):
    peak = Pair(graph=2 * GIB, estimate=estimate * GIB)
    *_, last = lines_of(Pair(graph=5, estimate=5), peak)
    assert last == f"live peak 2.00 GiB in the graph, {words}"
