"""Layers that the stages of each rank have at least, in every split that a caller considers.

A stage has a layer; one stage has them all. With several stages per rank a caller may consider the
rows' own splits alone (`VirtualSplit`): then the layers of every rank are known, by kind.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodels.layout_table import LayoutTable
from costmodels.model import ModelSpec
from costmodels.virtual_splits import virtual_splits

Column = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastLayers:
    """Layers that something has at least: [rows, ranks].

    Attributes:
        layers: Of any kind.
        main: Of the kind that most layers of the network are.

    """

    layers: Column
    main: Column

    def hold(self, per_kind: Column, main: int) -> Column:
        """Return what they hold at least of something that layers have by kind."""
        cheapest = self.layers * per_kind.min(axis=1)[:, None]
        least: Column = np.maximum(cheapest, self.main * per_kind[:, main][:, None])
        return least


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallestStages:
    """What the ranks of layouts have at least.

    Attributes:
        stage: Layers of each of a rank's stages.
        rank: Layers of all of them together.

    """

    stage: LeastLayers
    rank: LeastLayers


def smallest_stages(
    model: ModelSpec, table: LayoutTable, rows: NDArray[np.int64], *, known_splits: bool
) -> SmallestStages:
    """Return what the ranks of layouts have at least.

    Args:
        model: The network.
        table: Layouts.
        rows: Those that share their number of pipeline ranks.
        known_splits: With several stages per rank, only the row's own split counts.

    """
    kinds = [kind.has_experts for kind in model.layer_kinds]
    is_main = np.array(kinds) == (kinds.count(True) > kinds.count(False))
    counted = np.stack([np.ones(len(kinds)), is_main])  # of any kind, and of the main one
    pipeline = int(table.pipeline_parallel[rows[0]])
    any_split = counted.sum(axis=1) if pipeline == 1 else np.array([1.0, 0.0])
    stage = np.tile(any_split[:, None, None], (1, len(rows), pipeline))
    rank = stage * table.stages_per_rank[rows][:, None]
    splits, of_row = virtual_splits(table, rows)
    for number, split in enumerate(splits if known_splits else ()):
        if split.stages_per_rank > 1:
            first = np.cumsum((0, *split.of_layers(len(kinds))[:-1]))
            of_stage = np.add.reduceat(counted, first, axis=1)
            order = np.argsort(split.rank_of_stage, kind="stable")
            by_rank = of_stage[:, order].reshape(len(counted), pipeline, -1)
            stage[:, of_row == number] = by_rank.min(axis=2)[:, None]
            rank[:, of_row == number] = by_rank.sum(axis=2)[:, None]
    return SmallestStages(
        stage=LeastLayers(layers=stage[0], main=stage[1]),
        rank=LeastLayers(layers=rank[0], main=rank[1]),
    )
