"""Simulated pipelines that bound others of their shape, while a search runs.

A shape is a schedule with its ranks, stages and micro-batches; with several stages per rank its
split is known. The first layout of a shape that is reached is simulated; others of the shape are
bounded by it, and simulated themselves only where that leaves them in question.
"""

from dataclasses import dataclass, field

import numpy as np

from costmodels.layout import Layout
from costmodels.layout_table import SCHEDULES, LayoutTable
from costmodels.reference_bound import Reference
from planner.search.costs import Costs, Values

MOST_REFERENCES = 4  # chosen: per shape; more do not tighten the bound noticeably
Shape = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """References by shape; they grow while the search runs."""

    costs: Costs
    by_shape: dict[Shape, tuple[Reference, ...]] = field(default_factory=dict)

    def add(self, layout: Layout) -> None:
        """Simulate a layout as a reference, unless its shape has enough of them."""
        shape = (
            SCHEDULES.index(layout.schedule),
            layout.pipeline_parallel,
            layout.stages_per_rank,
            layout.num_micro_batches,
        )
        known = self.by_shape.get(shape, ())
        if len(known) < MOST_REFERENCES:
            self.by_shape[shape] = (*known, self.costs.reference(layout))

    def bound(self, table: LayoutTable, recomputed: Values, below: Values) -> Values:
        """Raise the bound of layouts whose shape has a reference.

        Args:
            table: Complete layouts.
            recomputed: Layers that each stage recomputes in full, at least.
            below: Bounds known already.

        """
        bound = below.copy()
        shapes = np.stack(
            [
                table.schedule,
                table.pipeline_parallel,
                table.stages_per_rank,
                table.num_micro_batches,
            ],
            axis=1,
        )
        unique, of_row = np.unique(shapes, axis=0, return_inverse=True)
        for number, (schedule, ranks, stages, micro_batches) in enumerate(unique.tolist()):
            known = self.by_shape.get((schedule, ranks, stages, micro_batches))
            if known:
                rows = np.flatnonzero(of_row.ravel() == number)
                raised = self.costs.reference_bound(table.take(rows), recomputed[rows], known)
                bound[rows] = np.maximum(bound[rows], raised)
        return bound
