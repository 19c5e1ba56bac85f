"""Simulated pipelines that bound others of their shape, while a search runs.

A shape is a schedule with its ranks, stages and micro-batches; with several stages per rank the
split of every layout is known. The first layout of a shape that is reached is simulated; others of
the shape are bounded by it, and simulated themselves only where that leaves them in question.
"""

from dataclasses import dataclass, field

import numpy as np

from costmodels.layout import Layout, Schedule
from costmodels.layout_table import SCHEDULES
from costmodels.schedule import PipelineShape
from costmodels.schedule.critical_path import CriticalPath
from costmodels.virtual_splits import VirtualSplit, virtual_splits
from planner.search.costs import Costs, Values
from planner.search.priced import PricedLayout, PricedTable

MOST_REFERENCES = 4  # chosen: per shape; more do not tighten the bound noticeably


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """References by shape; they grow while the search runs."""

    costs: Costs
    by_shape: dict[PipelineShape, tuple[CriticalPath, ...]] = field(default_factory=dict)

    def settle(self, priced: PricedLayout, split: Layout, cutoff: float) -> bool:
        """Whether references say that a split is not faster than a cutoff."""
        known = self.by_shape.get(PipelineShape.of(split), ())
        return bool(known) and priced.referenced_seconds(split, known) >= cutoff

    def add(self, priced: PricedLayout, split: Layout) -> None:
        """Make a split a reference, unless its shape has enough of them."""
        known = self.by_shape.get(PipelineShape.of(split), ())
        if len(known) < MOST_REFERENCES:
            self.by_shape[PipelineShape.of(split)] = (*known, priced.reference(split))

    def bound(self, priced: PricedTable, below: Values) -> Values:
        """Raise the bound of layouts whose shape has a reference.

        Args:
            priced: Complete layouts.
            below: Bounds known already.

        """
        bound, table = below.copy(), priced.table
        splits, split_of_row = virtual_splits(table)
        columns = (table.schedule, table.num_micro_batches, split_of_row)
        unique, of_row = np.unique(np.stack(columns), axis=1, return_inverse=True)
        each = [(_shape_of(SCHEDULES[s], splits[n], m), splits[n]) for s, m, n in unique.T.tolist()]
        if not any(shape in self.by_shape for shape, _ in each):
            return bound
        bounds = self.costs.reference_bound(priced)
        for number, (shape, split) in enumerate(each):
            known = self.by_shape.get(shape)
            if known:
                rows = np.flatnonzero(of_row == number)
                raised = bounds.seconds(
                    rows,
                    shape.rank_of_stage,
                    split.of_layers(priced.model.num_layers),
                    priced.least_recomputed[rows],
                    known,
                )
                bound[rows] = np.maximum(bound[rows], raised)
        return bound


def _shape_of(schedule: Schedule, split: VirtualSplit, micro_batches: int) -> PipelineShape:
    return PipelineShape(
        schedule=schedule,
        pipeline_parallel=split.pipeline_parallel,
        stages_per_rank=split.stages_per_rank,
        num_micro_batches=micro_batches,
    )
