"""How a value lies on one mesh axis, and how shape operations move that.

    Replicated()     every rank holds the whole value
    Sharded(dim)     ranks hold equal parts along a dim, in rank order
    Partial()        ranks hold summands of the value

A dim made of `num_segments` equal segments (queries, keys, values side by side) is cut segment by
segment. The same three words as PyTorch's DTensor (Replicate, Shard, Partial).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every rank holds the whole value."""


@dataclass(frozen=True, slots=True)
class Partial:
    """The value is the sum over ranks."""


@dataclass(frozen=True, slots=True)
class Sharded:
    """Ranks hold equal parts along a dim."""

    dim: int
    num_segments: int = 1


Placement: TypeAlias = Replicated | Partial | Sharded
Size: TypeAlias = int | torch.SymInt


def reshaped_dim(before: Sequence[Size], after: Sequence[Size], dim: int) -> int | None:
    """Return where a cut dim goes in a reshape, None if the cut does not survive.

    Both shapes are read from the left in groups of equal products; a cut survives if its dim leads
    its group: [b, s, A * D] -> [b, s, A, D] keeps a cut of the heads, [b, s, H] -> [b * s, H] loses
    one of the sequence.

    Args:
        before: Shape of the whole input.
        after: Shape of the whole result, without -1.
        dim: The cut dim of the input.

    """
    i = j = 0
    while i < len(before):
        group_in, group_out = [i], [j] if j < len(after) else []
        left, right = int(before[i]), int(after[j]) if j < len(after) else 1
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left *= int(before[i])
                group_in.append(i)
                i += 1
            else:
                right *= int(after[j])
                group_out.append(j)
                j += 1
        if dim in group_in:
            leads = [d for d in group_in if int(before[d]) != 1][:1]
            heads = [d for d in group_out if int(after[d]) != 1][:1]
            return heads[0] if leads == [dim] and heads else None
    return None


def moved_by_transpose(dim: int, first: int, second: int) -> int:
    """Return where a dim goes when two dims change places."""
    return {first: second, second: first}.get(dim, dim)
