"""What is known of the splits that the search considers, row by row, before any is made.

One stage holds everything. One stage per rank may hold anything. With several stages per rank the
split is the even one, so the layers of every rank are known; those of the model's main kind (with
experts or without, whichever are more) are counted.
"""

import numpy as np

from costmodels.bounds.pipeline import SplitLimits
from costmodels.layout import split_layers
from costmodels.layout_table import LayoutTable
from costmodels.model import ModelSpec
from planner.search.costs import Values


def split_limits(
    model: ModelSpec,
    table: LayoutTable,
    *,
    recomputed: Values,
    fullest: Values,
    even_chunks: bool = True,
) -> SplitLimits:
    """Return the limits of every row's splits.

    Args:
        model: The network.
        table: Layouts.
        recomputed: Layers that each stage recomputes in full, at least.
        fullest: Layers of the main kind on some rank, at least; known better where the split is.
        even_chunks: False where the user states the split.

    """
    is_v_shaped = table.is_v_shaped
    keys = np.stack([table.pipeline_parallel, table.stages_per_rank, is_v_shaped.astype(np.int64)])
    unique, of_row = np.unique(keys, axis=1, return_inverse=True)
    facts = [_facts(model, int(p), int(v), bool(is_v), even_chunks) for p, v, is_v in unique.T]
    few, heaviest, ahead, last, chunk = np.array(facts).reshape(-1, 5)[of_row.ravel()].T
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
    model: ModelSpec, pipeline: int, chunks: int, is_v_shaped: bool, even_chunks: bool
) -> tuple[float, float, float, float, float]:
    """Return layers of the smallest stage, and main layers of several places.

    These are the fullest rank, the first stage of every rank but the last, the last rank, and the
    smallest stage of the fullest rank (0 where the split is not known).
    """
    kinds = [kind.has_experts for kind in model.layer_kinds]
    main = kinds.count(True) > kinds.count(False)
    if pipeline == 1:
        return len(kinds), kinds.count(main), 0.0, 0.0, 0.0
    if chunks == 1 or not even_chunks:
        return 1.0, 0.0, 0.0, 0.0, 0.0
    sizes = split_layers(model.num_layers, pipeline * chunks)
    by_rank: list[list[int]] = [[] for _ in range(pipeline)]
    first = 0
    for stage, size in enumerate(sizes):
        mirrored = min(stage, pipeline * chunks - 1 - stage)
        rank = mirrored if is_v_shaped else stage % pipeline
        by_rank[rank].append(kinds[first : first + size].count(main))
        first += size
    fullest = max(by_rank, key=lambda stages: (sum(stages), min(stages)))
    ahead = sum(stages[0] for stages in by_rank[:-1])
    return min(sizes), sum(fullest), ahead, sum(by_rank[-1]), min(fullest)
