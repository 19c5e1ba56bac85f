"""What is known of the splits that the search considers, row by row, before any is made.

One stage holds everything. One stage per rank may hold anything. With several stages per rank the
row names its split, so the layers of every rank are known; those of the model's main kind (with
experts or without, whichever are more) are counted.
"""

import numpy as np

from costmodels.bounds.pipeline import SplitLimits
from costmodels.layout_table import LayoutTable
from costmodels.model import ModelSpec
from costmodels.virtual_splits import VirtualSplit, virtual_splits
from planner.search.costs import Values


def split_limits(
    model: ModelSpec,
    table: LayoutTable,
    *,
    recomputed: Values,
    fullest: Values,
    known_splits: bool = True,
) -> SplitLimits:
    """Return the limits of every row's splits.

    Args:
        model: The network.
        table: Layouts.
        recomputed: Layers that each stage recomputes in full, at least.
        fullest: Layers of the main kind on some rank, at least; known better where the split is.
        known_splits: False where the user states the split.

    """
    splits, of_row = virtual_splits(table)
    facts = [_facts(model, split, known=known_splits) for split in splits]
    few, heaviest, ahead, last, chunk = np.array(facts).reshape(-1, 5)[of_row].T
    chunks = np.where(chunk > 0, table.stages_per_rank, 1)
    held = np.where(chunk > 0, chunk, np.maximum(fullest, heaviest))
    return SplitLimits(
        layers=few,
        recomputed=recomputed,
        fullest=np.maximum(fullest, heaviest),
        ahead=ahead,
        last=last,
        redone=chunks * np.minimum(recomputed, held),
    )


def _facts(
    model: ModelSpec, split: VirtualSplit, *, known: bool
) -> tuple[float, float, float, float, float]:
    """Return layers of the smallest stage, and main layers of several places.

    These are the fullest rank, the first stage of every rank but the last, the last rank, and the
    smallest stage of the fullest rank (0 where the split is not known).
    """
    kinds = [kind.has_experts for kind in model.layer_kinds]
    main = kinds.count(True) > kinds.count(False)
    if split.pipeline_parallel == 1:
        return len(kinds), kinds.count(main), 0.0, 0.0, 0.0
    if split.stages_per_rank == 1 or not known:
        return 1.0, 0.0, 0.0, 0.0, 0.0
    sizes = split.of_layers(len(kinds))
    by_rank: list[list[int]] = [[] for _ in range(split.pipeline_parallel)]
    first = 0
    for rank, size in zip(split.rank_of_stage, sizes, strict=True):
        by_rank[rank].append(kinds[first : first + size].count(main))
        first += size
    fullest = max(by_rank, key=lambda stages: (sum(stages), min(stages)))
    ahead = sum(stages[0] for stages in by_rank[:-1])
    return min(sizes), sum(fullest), ahead, sum(by_rank[-1]), min(fullest)
