"""Boxes: a rank's flat piece of a parameter as blocks of the whole tensor.

ZeRO cuts flat memory, tensor parallelism cuts dims; a checkpoint names blocks of whole tensors. A
flat range of a row-major tensor is at most one partial row, full rows and another partial row, and
so on down the dims.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor

from runtime.communication.mesh import Mesh
from runtime.program import ParameterShard
from runtime.states.buckets import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A block of a whole tensor.

    Attributes:
        offsets: Where it begins, per dim.
        sizes: How far it reaches, per dim.
        values: Its elements, a view of the piece that it was made from.

    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    values: Tensor


def ranges(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Cut the flat range of a row-major tensor into blocks, each a (begin, end) per dim."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield ((start, stop),)
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # full rows
    if first > last:  # inside of one row
        inside = ranges(shape[1:], start - last * row, stop - last * row)
        yield from (((last, last + 1), *block) for block in inside)
        return
    head = ranges(shape[1:], start - (first - 1) * row, row) if start % row else ()
    yield from (((first - 1, first), *block) for block in head)
    if first < last:
        yield ((first, last), *((0, size) for size in shape[1:]))
    tail = ranges(shape[1:], 0, stop % row)
    yield from (((last, last + 1), *block) for block in tail)


def piece_boxes(mesh: Mesh, segment: Segment, piece: Tensor) -> Iterator[Box]:
    """Return what a rank holds of a parameter, or of something of its shape, as blocks.

    Args:
        mesh: Where the rank stands.
        segment: Which piece of which parameter.
        piece: The piece's elements, flat: the weights themselves, or a state of the optimizer.

    """
    shard = segment.shard
    index, count = _place(mesh, shard.axis)
    block, num_blocks = _place(mesh, shard.block_axis)
    size = shard.global_shape[0] // num_blocks
    local = replace(shard, global_shape=(size, *shard.global_shape[1:]))
    for box in boxes(local, index, count, segment.start, piece):
        first, *others = box.offsets
        yield replace(box, offsets=(first + block * size, *others))


def _place(mesh: Mesh, axis: str | None) -> tuple[int, int]:
    return (0, 1) if axis is None else (mesh.coordinate(axis), mesh.size(axis))


def boxes(
    shard: ParameterShard, index: int, count: int, start: int, piece: Tensor
) -> Iterator[Box]:
    """Return a flat piece of a local tensor as blocks of the whole, without padding.

    Args:
        shard: Which parameter, and how an axis cuts it.
        index: The rank's place on that axis.
        count: Size of that axis; 1 where nothing is cut.
        start: Element of the local tensor at which the piece begins.
        piece: Its elements, flat.

    """
    shape = shard.local_shape(count)
    for block in ranges(shape, start, start + piece.numel()):
        begin = sum(low * prod(shape[dim + 1 :]) for dim, (low, _) in enumerate(block))
        sizes = tuple(high - low for low, high in block)
        values = piece[begin - start :][: prod(sizes)].view(sizes)
        yield from _in_whole(shard, index, count, block, values)


def _in_whole(
    shard: ParameterShard,
    index: int,
    count: int,
    block: tuple[tuple[int, int], ...],
    values: Tensor,
) -> Iterator[Box]:
    """Move a block of the local tensor to its place in the whole, segment by segment."""
    offsets = tuple(low for low, _ in block)
    if shard.dim is None:
        yield Box(offsets=offsets, sizes=tuple(values.shape), values=values)
        return
    dim, (low, high) = shard.dim, block[shard.dim]
    size = shard.padded_size // count // shard.num_segments  # of a segment's local part
    for segment in range(low // size, -(-high // size)):
        begin, end = max(low, segment * size), min(high, (segment + 1) * size)
        # All full segments before it, this rank's part of it, the place inside.
        place = segment * size * count + index * size + begin - segment * size
        length = min(end - begin, shard.global_shape[dim] - place)
        if length > 0:
            part = values.narrow(dim, begin - low, length)
            yield Box(
                offsets=(*offsets[:dim], place, *offsets[dim + 1 :]),
                sizes=tuple(part.shape),
                values=part,
            )
