"""Simulated pipelines that bound others of their shape, while a search runs.

A shape is a schedule with its ranks, stages and micro-batches; with several stages per rank its
split is known. The first layout of a shape that is reached is simulated; others of the shape are
bounded by it, and simulated themselves only where that leaves them in question.
"""

from dataclasses import dataclass, field

import numpy as np

from costmodels.layout import Layout, Schedule
from costmodels.layout_table import SCHEDULES
from costmodels.schedule import PipelineShape
from costmodels.schedule.critical_path import CriticalPath
from planner.search.costs import Costs, Values
from planner.search.priced import PricedLayout, PricedTable

MOST_REFERENCES = 4  # chosen: per shape; more do not tighten the bound noticeably


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """References by shape; they grow while the search runs."""

    costs: Costs
    by_shape: dict[PipelineShape, tuple[CriticalPath, ...]] = field(default_factory=dict)

    def settle(self, priced: PricedLayout, split: Layout, cutoff: float) -> bool:
        """Whether references say that an even split is not faster than a cutoff."""
        known = self.by_shape.get(_shape(split), ())
        return bool(known) and priced.referenced_seconds(split, known) >= cutoff

    def add(self, priced: PricedLayout, split: Layout) -> None:
        """Make an even split a reference, unless its shape has enough of them."""
        known = self.by_shape.get(_shape(split), ())
        if len(known) < MOST_REFERENCES:
            self.by_shape[_shape(split)] = (*known, priced.reference(split))

    def bound(self, priced: PricedTable, below: Values) -> Values:
        """Raise the bound of layouts whose shape has a reference.

        Args:
            priced: Complete layouts.
            below: Bounds known already.

        """
        bound, table = below.copy(), priced.table
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
        each = [_shape_of(SCHEDULES[s], p, v, m) for s, p, v, m in unique.tolist()]
        if not any(shape in self.by_shape for shape in each):
            return bound
        bounds = self.costs.reference_bound(priced)
        for number, shape in enumerate(each):
            known = self.by_shape.get(shape)
            if known:
                rows = np.flatnonzero(of_row.ravel() == number)
                raised = bounds.seconds(
                    rows, shape.rank_of_stage, priced.least_recomputed[rows], known
                )
                bound[rows] = np.maximum(bound[rows], raised)
        return bound


def _shape(layout: Layout) -> PipelineShape:
    return _shape_of(
        layout.schedule,
        layout.pipeline_parallel,
        layout.stages_per_rank,
        layout.num_micro_batches,
    )


def _shape_of(schedule: Schedule, ranks: int, stages: int, micro_batches: int) -> PipelineShape:
    return PipelineShape(
        schedule=schedule,
        pipeline_parallel=ranks,
        stages_per_rank=stages,
        num_micro_batches=micro_batches,
    )
