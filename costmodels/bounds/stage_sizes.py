"""Layers that the stages of each rank have at least, in every split that a caller considers.

A stage has a layer; one stage has them all. With several stages per rank a caller may consider the
even split alone (`split_layers`): then the layers of every rank are known, by kind.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodels.layout import split_layers
from costmodels.layout_table import LayoutTable, distinct
from costmodels.model import ModelSpec

Column = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallestStages:
    """Layers that each stage of a rank has at least: [rows, ranks].

    Attributes:
        layers: Of any kind.
        main: Of the kind that most layers of the network are.

    """

    layers: Column
    main: Column

    def least(self, per_kind: Column, main: int) -> Column:
        """Return what a stage has at least of something that layers have by kind."""
        cheapest = self.layers * per_kind.min(axis=1)[:, None]
        least: Column = np.maximum(cheapest, self.main * per_kind[:, main][:, None])
        return least


def smallest_stages(
    model: ModelSpec, table: LayoutTable, rows: NDArray[np.int64], *, even_chunks: bool
) -> SmallestStages:
    """Return what the stages of each rank have at least.

    Args:
        model: The network.
        table: Layouts.
        rows: Those that share their number of pipeline ranks.
        even_chunks: With several stages per rank, only the even split counts.

    """
    kinds = [kind.has_experts for kind in model.layer_kinds]
    is_main = np.array(kinds) == (kinds.count(True) > kinds.count(False))
    pipeline = int(table.pipeline_parallel[rows[0]])
    one = pipeline == 1
    layers = np.full((len(rows), pipeline), float(len(kinds) if one else 1))
    main = np.full((len(rows), pipeline), float(is_main.sum() if one else 0))
    if even_chunks and not one:
        is_v_shaped = table.is_v_shaped[rows]
        for chunks in distinct(table.stages_per_rank[rows]).tolist():
            sizes = split_layers(len(kinds), pipeline * chunks)
            of_main = np.add.reduceat(is_main, np.cumsum((0, *sizes[:-1])), dtype=np.float64)
            for is_v in (False, True):
                of_rank = (table.stages_per_rank[rows] == chunks) & (chunks > 1)
                of_rank &= is_v_shaped == is_v
                layers[of_rank] = _least_of_ranks(np.array(sizes, dtype=np.float64), chunks, is_v)
                main[of_rank] = _least_of_ranks(of_main, chunks, is_v)
    return SmallestStages(layers=layers, main=main)


def _least_of_ranks(of_stage: Column, chunks: int, is_v_shaped: bool) -> Column:
    """Return the smallest of each rank's stages; in a V every other chunk runs backwards."""
    by_chunk = of_stage.reshape(chunks, -1).copy()
    if is_v_shaped:
        by_chunk[1::2] = by_chunk[1::2, ::-1]
    least: Column = by_chunk.min(axis=0)
    return least
