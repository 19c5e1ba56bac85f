"""Where a rank stands in a layout's grid, and who stands with it along each axis.

Ranks are numbered along `layout.rank_order`, first axis fastest. Beside the four axes of that
grid there are groups that follow from them:

    dp_cp          ranks that hold the same weights and see other tokens (data x context)
    zero           the part of dp_cp that a state is cut over: `zero_group` neighbours
    zero_replicas  ranks of dp_cp that hold the same piece of a state (HSDP)
    ends           the two pipeline ranks that hold the first and the last stage (tied embeddings)
    etp, ep, edp   expert axes folded over data x context x tensor of one stage, etp fastest
    expert_zero, expert_zero_replicas   what `zero` is to dp_cp, of the ranks of edp
    world          everybody

Plain numbers: nothing here needs a running job.
"""

from collections.abc import Mapping, Sequence

from costmodels.layout import AXES, Layout

EXPERT_AXES = ("etp", "ep", "edp")
EXPERT_STATE_AXES = ("expert_zero", "expert_zero_replicas")
GROUP_AXES = (
    *AXES,
    "dp_cp",
    "zero",
    "zero_replicas",
    "ends",
    *EXPERT_AXES,
    *EXPERT_STATE_AXES,
    "world",
)


def degrees(layout: Layout) -> dict[str, int]:
    """Return the size of each of the grid's four axes."""
    return {
        "tp": layout.tensor_parallel,
        "cp": layout.context_parallel,
        "dp": layout.data_parallel,
        "pp": layout.pipeline_parallel,
    }


def coordinates(layout: Layout, rank: int) -> dict[str, int]:
    """Return the place of a global rank on each of the grid's four axes."""
    sizes, place = degrees(layout), {}
    for axis in layout.rank_order:
        rank, place[axis] = divmod(rank, sizes[axis])
    return place


def rank_at(layout: Layout, place: Mapping[str, int]) -> int:
    """Return the global rank at a place; the inverse of `coordinates`."""
    sizes, rank, stride = degrees(layout), 0, 1
    for axis in layout.rank_order:
        rank += place[axis] * stride
        stride *= sizes[axis]
    return rank


def members(layout: Layout, rank: int, axis: str) -> tuple[int, ...]:
    """Return the global ranks, ascending, of the group along an axis through a rank.

    Args:
        layout: Degrees and rank order.
        rank: The global rank that asks.
        axis: One of GROUP_AXES.

    """
    if axis == "world":
        return tuple(range(layout.num_gpus))
    if axis in AXES:
        return _spanned(layout, rank, (axis,))
    if axis == "ends":
        return _ends(layout, rank)
    if axis in EXPERT_AXES:
        return _expert_members(layout, rank, axis)
    peers = _spanned(layout, rank, ("dp", "cp"))
    if axis == "dp_cp":
        return peers
    size = layout.zero_group
    if axis in EXPERT_STATE_AXES:
        peers, size = _expert_members(layout, rank, "edp"), expert_zero_group(layout)
    block, offset = divmod(peers.index(rank), size)
    return peers[offset::size] if axis.endswith("replicas") else peers[block * size :][:size]


def expert_zero_group(layout: Layout) -> int:
    """Return how many ranks cut a state of experts: those of a ZeRO group that share experts."""
    experts = layout.expert_parallel * layout.expert_tensor_parallel
    return max(layout.zero_group * layout.tensor_parallel // experts, 1)


def partition(layout: Layout, axis: str) -> tuple[tuple[int, ...], ...]:
    """Return the groups of all ranks along an axis, by their first rank."""
    found: dict[int, tuple[int, ...]] = {}
    for rank in range(layout.num_gpus):
        if rank not in found:
            ranks = members(layout, rank, axis)
            found.update(dict.fromkeys(ranks, ranks))
    return tuple(dict.fromkeys(found.values()))


def _spanned(layout: Layout, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
    """Return the ranks that differ from one in the given axes only."""
    here, sizes = coordinates(layout, rank), degrees(layout)
    places = [here]
    for axis in axes:
        places = [{**place, axis: i} for place in places for i in range(sizes[axis])]
    return tuple(sorted(rank_at(layout, place) for place in places))


def _ends(layout: Layout, rank: int) -> tuple[int, ...]:
    here = coordinates(layout, rank)
    ends = {layout.rank_of_stage(0), layout.rank_of_stage(layout.num_stages - 1)}
    if here["pp"] not in ends:
        return (rank,)
    return tuple(sorted(rank_at(layout, {**here, "pp": end}) for end in ends))


def _expert_members(layout: Layout, rank: int, axis: str) -> tuple[int, ...]:
    peers = _spanned(layout, rank, ("dp", "cp", "tp"))
    tensor, expert = layout.expert_tensor_parallel, layout.expert_parallel
    at = peers.index(rank)
    if axis == "etp":
        return peers[at - at % tensor :][:tensor]
    block = tensor * expert
    if axis == "ep":
        return peers[at - at % block + at % tensor :][: block - at % tensor : tensor]
    return peers[at % block :: block]
