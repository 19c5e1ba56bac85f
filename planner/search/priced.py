"""Layouts with their blocks priced once: exact seconds and bytes of any of their splits.

A search judges many splits of one layout, and many numbers of recomputed layers. What its blocks
take and hold does not depend on them, so it is found on the first question and kept, and for a
whole table of layouts in one call.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from costmodels.bounds.reference import (
    ReferenceBound,
    recomputed_layers,
    reference_of,
)
from costmodels.bounds.time import around_rows
from costmodels.hardware import Cluster
from costmodels.job import TrainingJob
from costmodels.layout import Layout
from costmodels.layout_table import LayoutTable, table_of
from costmodels.memory.blocks import BlockMemory, block_memory
from costmodels.memory.estimate import MemoryDemand, blocks_of_layout, memory_demand
from costmodels.model import ModelSpec
from costmodels.schedule.critical_path import CriticalPath
from costmodels.time.estimate import step_seconds
from costmodels.time.layouts import LayoutCosts, layout_costs
from costmodels.virtual_splits import VirtualSplit
from planner.search.stage_problem import ScoredProblem
from planner.search.stage_scores import scored_problem


@dataclass(frozen=True, kw_only=True)
class PricedTable:
    """The exact models of some layouts.

    Attributes:
        least_recomputed: Layers that each stage recomputes in full, at least, one entry per layout.
        known: Seconds of their blocks, where they were rows of a table that was priced.

    """

    model: ModelSpec
    job: TrainingJob
    cluster: Cluster
    table: LayoutTable
    least_recomputed: NDArray[np.float64]
    known: LayoutCosts | None = None

    @cached_property
    def costs(self) -> LayoutCosts:
        """Seconds of their blocks."""
        if self.known is not None:
            return self.known
        return layout_costs(self.model, self.job, self.cluster, self.table)

    def take(self, rows: NDArray[np.int64]) -> "PricedTable":
        """Return some of the layouts; their blocks are not priced again."""
        return replace(
            self,
            table=self.table.take(rows),
            least_recomputed=self.least_recomputed[rows],
            known=self.costs.take(rows),
        )

    @cached_property
    def blocks(self) -> BlockMemory:
        """Bytes of their blocks."""
        return block_memory(self.model, self.job, self.cluster, self.table)

    def layout(self, row: int) -> "PricedLayout":
        """Return one of them, with the split that its row names."""
        return PricedLayout(
            model=self.model,
            job=self.job,
            cluster=self.cluster,
            layout=layout_of_row(self.table, row, self.model.num_layers),
            least_recomputed=int(self.least_recomputed[row]),
            together=self,
            row=row,
        )


@dataclass(frozen=True, kw_only=True)
class PricedLayout:
    """The exact models of one layout; splits differ from it in layers and recomputed layers.

    Attributes:
        layout: It, with any split.
        least_recomputed: Layers that each stage recomputes in full, at least.
        together: Layouts that are priced in one call with it; None prices it alone.
        row: Its row there.

    """

    model: ModelSpec
    job: TrainingJob
    cluster: Cluster
    layout: Layout
    least_recomputed: int = 0
    together: PricedTable | None = None
    row: int = 0

    @cached_property
    def costs(self) -> LayoutCosts:
        """Seconds of its blocks."""
        if self.together is not None:
            return self.together.costs.take(np.array([self.row]))
        table = table_of([self.layout])
        modules = self.layout.recompute_modules
        return layout_costs(self.model, self.job, self.cluster, table, modules)

    @cached_property
    def blocks(self) -> BlockMemory:
        """Bytes of its blocks."""
        if self.together is not None:
            return self.together.blocks.take(np.array([self.row]))
        return blocks_of_layout(self.model, self.job, self.cluster, self.layout)

    def memory(self, split: Layout) -> MemoryDemand:
        """Return the exact memory of one split's fullest rank."""
        return memory_demand(self.model, self.job, self.cluster, split, self.blocks)

    def seconds(self, split: Layout) -> float:
        """Return the exact seconds of one split."""
        return step_seconds(self.model, self.job, self.cluster, split, self.costs)

    def reference(self, split: Layout) -> CriticalPath:
        """Return the critical path of a split's pipeline."""
        return reference_of(self.model, self.job, split, self.costs)

    def referenced_seconds(self, split: Layout, references: tuple[CriticalPath, ...]) -> float:
        """Return seconds that a split does not go below, by pipelines of its shape."""
        table = table_of([split])
        once, stretch = around_rows(self.model, self.job, self.cluster, table, self.costs)
        bound = ReferenceBound(model=self.model, costs=self.costs, once=once, stretch=stretch)
        redone = np.array([float(recomputed_layers(self.model, split))])
        ranks = tuple(map(split.rank_of_stage, range(split.num_stages)))
        own = split.layers_per_stage
        return float(bound.seconds(np.array([0]), ranks, own, redone, references)[0])

    def stage_problem(self, limit: float) -> ScoredProblem:
        """Return the problem of splitting the layers under a memory limit in bytes."""
        return scored_problem(
            self.model,
            self.job,
            self.cluster,
            self.layout,
            limit,
            costs=self.costs,
            blocks=self.blocks,
        )


def layout_of_row(table: LayoutTable, row: int, num_layers: int) -> Layout:
    """Return a row as a layout with the split that it names: the even one, or a lighter last stage.

    Sequence parallelism is off at tp 1.
    """
    layout = table.layout(row, (), 0)
    shape = (layout.pipeline_parallel, layout.stages_per_rank)
    split = VirtualSplit(*shape, int(table.lighter_last[row]), layout.stages_are_v_shaped)
    splits = layout.sequence_parallel and layout.tensor_parallel > 1
    return replace(layout, sequence_parallel=splits, layers_per_stage=split.of_layers(num_layers))
