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
    pipeline = int(table.pipeline_parallel[rows[0]])
    one = pipeline == 1
    layers = np.full((len(rows), pipeline), float(len(kinds) if one else 1))
    main = np.full((len(rows), pipeline), float(is_main.sum() if one else 0))
    stages = table.stages_per_rank[rows][:, None]
    stage = LeastLayers(layers=layers, main=main)
    rank = LeastLayers(layers=layers * stages, main=main * stages)
    splits, of_row = virtual_splits(table.take(rows))
    for number, split in enumerate(splits if known_splits else ()):
        if split.stages_per_rank > 1:
            sizes = split.of_layers(len(kinds))
            of_main = np.add.reduceat(is_main, np.cumsum((0, *sizes[:-1])), dtype=np.float64)
            order, some = np.argsort(split.rank_of_stage, kind="stable"), of_row == number
            for of_stage, name in ((np.array(sizes), "layers"), (of_main, "main")):
                by_rank = of_stage[order].reshape(pipeline, -1)
                getattr(stage, name)[some] = by_rank.min(axis=1)
                getattr(rank, name)[some] = by_rank.sum(axis=1)
    return SmallestStages(stage=stage, rank=rank)
