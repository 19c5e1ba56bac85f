"""Splits that count where a pipeline rank has several (virtual) stages.

One stage per rank may hold any number of layers. With several the splits are too many to prove the
best of, and those of one rank's layers among its own stages hardly differ. What matters is that the
last stage has work of its own: the head of Llama 3.1 8B weighs two and a half of its layers. So
these splits count, and are an axis of the search's space (`LayoutTable.lighter_last`):

    the even one (`split_layers`), and those in which the last stage gives some of its layers, one
    after the other, to the rank with the fewest (not its own), and there to the shortest stage but
    the first; of equals to the last one, which holds fewest micro-batches
"""

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from costmodels.layout import rank_of_stage, split_layers
from costmodels.layout_table import IntColumn, LayoutTable
from costmodels.model import ModelSpec
from costmodels.parameters import matmul_parameters

MOST_FROM_LAST = 3  # chosen: what the heaviest heads of models that people pipeline weigh

Split = tuple[int, ...]


def head_in_layers(model: ModelSpec) -> float:
    """Return how many layers the head weighs, by weights in matrix products of a token."""
    head = model.vocab_size * model.hidden_size
    return head * model.num_layers / (matmul_parameters(model) - head)


class VirtualSplit(NamedTuple):
    """What names a split of several stages per rank; of one stage per rank, only the even one.

    Attributes:
        pipeline_parallel: Ranks, at least two where the last stage is lighter.
        stages_per_rank: Stages of each rank.
        lighter_last: Layers that the last stage gives up, fewer than it has in the even split.
        is_v_shaped: See Schedule.

    """

    pipeline_parallel: int
    stages_per_rank: int
    lighter_last: int
    is_v_shaped: bool

    @property
    def rank_of_stage(self) -> tuple[int, ...]:
        """Pipeline rank of each global stage."""
        return tuple(
            rank_of_stage(stage, self.pipeline_parallel, is_v_shaped=self.is_v_shaped)
            for stage in range(self.pipeline_parallel * self.stages_per_rank)
        )

    def of_layers(self, num_layers: int) -> Split:
        """Return the layers of each stage."""
        return _split(num_layers, self)


def virtual_splits(
    table: LayoutTable, rows: NDArray[np.int64] | slice = slice(None)
) -> tuple[list[VirtualSplit], IntColumn]:
    """Return the distinct splits that rows of a table name, and which of them each row does."""
    # One number a row: distinct rows of several columns take numpy much longer.
    stages, last = int(table.stages_per_rank.max(initial=0)) + 1, MOST_FROM_LAST + 1
    key = (table.pipeline_parallel * stages + table.stages_per_rank) * last + table.lighter_last
    unique, of_row = np.unique((2 * key + table.is_v_shaped)[rows], return_inverse=True)
    names = []
    for number in unique.tolist():
        rest, is_v_shaped = divmod(number, 2)
        rest, lighter_last = divmod(rest, last)
        ranks, per_rank = divmod(rest, stages)
        names.append(VirtualSplit(ranks, per_rank, lighter_last, bool(is_v_shaped)))
    return names, of_row


def longest_stages(num_layers: int, table: LayoutTable) -> IntColumn:
    """Return how many layers a stage of each row has at most, with the split that a row names."""
    stages = table.pipeline_parallel * table.stages_per_rank
    free = num_layers - stages + 1  # every other stage has one
    named = -(-num_layers // stages) + table.lighter_last
    return np.where(table.stages_per_rank > 1, named, free)


@lru_cache(maxsize=4096)
def _split(num_layers: int, name: VirtualSplit) -> Split:
    ranks = name.rank_of_stage
    split = split_layers(num_layers, len(ranks))
    for _ in range(name.lighter_last):
        split = _with_lighter_last(split, ranks)
    return split


def _with_lighter_last(split: Split, ranks: tuple[int, ...]) -> Split:
    held: Counter[int] = Counter()
    for layers, rank in zip(split, ranks, strict=True):
        held[rank] += layers
    others = set(ranks) - {ranks[-1]}
    taker = min(others, key=lambda rank: (held[rank], -rank))
    inner = [stage for stage in range(1, len(split)) if ranks[stage] == taker]
    longer = min(inner, key=lambda stage: (split[stage], -stage))
    moved = {len(split) - 1: -1, longer: 1}
    return tuple(layers + moved.get(stage, 0) for stage, layers in enumerate(split))
