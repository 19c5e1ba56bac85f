"""Who sends how many rows to whom when tokens visit experts on other ranks.

Ranks tell each other how many rows each expert gets from them; one read by the host turns that
into sizes of transfers. A dry run, whose tensors hold no values, takes equal shares.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from runtime.communication import collectives
from runtime.communication.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Sizes of one dispatch, as one rank sees them.

    Attributes:
        sent: Rows that go to each rank of axis "ep".
        received: Rows that come from each.
        longest: The most rows that a rank of this "etp" group receives, at least one; the others
            pad to it.
        rows_of_expert: Rows of each of this rank's experts, over the whole "etp" group.
        places: [sum(rows_of_expert)]: where the rows of the first expert, then the second, ... lie
            among those that the "etp" group has gathered.

    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    longest: int
    rows_of_expert: tuple[int, ...]
    places: Tensor


def local_counts(counts: Tensor, num_rows: int) -> tuple[int, ...]:
    """Return on the host how many rows each expert gets; equal shares in a dry run."""
    if not is_fake(counts):
        return tuple(counts.tolist())
    return tuple(_equal_shares(num_rows, counts.shape[0]))


def meet(counts: Tensor, num_rows: int, mesh: Mesh) -> Traffic:
    """Exchange counts with the ranks of the expert axes and work out the sizes of a dispatch.

    Args:
        counts: [E], rows of this rank for each expert.
        num_rows: Their sum.
        mesh: Where this rank stands.

    """
    expert, tensor = mesh.group("ep"), mesh.group("etp")
    num_local = counts.shape[0] // expert.size
    sizes = [num_local] * expert.size
    arriving = collectives.all_to_all(counts, mesh, "ep", sizes, sizes)
    table = counts.new_empty(tensor.size * counts.shape[0])
    collectives.start_all_gather(table, arriving, tensor).wait()
    if is_fake(counts):
        own = _equal_shares(num_rows, counts.shape[0])
        mine = own[expert.index * num_local :][:num_local]
        known = mine * (expert.size * tensor.size)
    else:
        both = torch.cat((counts, table)).tolist()
        own, known = both[: counts.shape[0]], both[counts.shape[0] :]
    per_rank = [_sums(part, num_local) for part in _parts(known, counts.shape[0])]
    lengths = [sum(part) for part in per_rank]
    longest = max(*lengths, 1)  # a group in which nobody has rows still gathers something
    return Traffic(
        sent=tuple(_sums(own, num_local)),
        received=tuple(per_rank[tensor.index]),
        longest=longest,
        rows_of_expert=tuple(sum(known[expert::num_local]) for expert in range(num_local)),
        places=_places(table, lengths, longest, num_local),
    )


def _places(table: Tensor, lengths: Sequence[int], longest: int, num_local: int) -> Tensor:
    """Sort arrived rows by expert; they come by "etp" rank (padded), sender and expert."""
    total = sum(lengths)
    experts = torch.arange(table.shape[0], device=table.device) % num_local
    of_row = experts.repeat_interleave(table, output_size=total)
    order = of_row.argsort(stable=True)
    starts = [
        torch.arange(length, device=table.device) + place * longest
        for place, length in enumerate(lengths)
    ]
    return torch.cat(starts).index_select(0, order)


def _equal_shares(total: int, ways: int) -> list[int]:
    base, extra = divmod(total, ways)
    return [base + (i < extra) for i in range(ways)]


def _parts(values: Sequence[int], size: int) -> list[list[int]]:
    return [list(values[i : i + size]) for i in range(0, len(values), size)]


def _sums(values: Sequence[int], size: int) -> list[int]:
    return [sum(part) for part in _parts(values, size)]
