"""Heads for tokens and back: each rank attends to the whole sequence with some of the heads.

    to_heads     [b, A, s, d]      a share of the tokens, all heads
              -> [b, A/n, n s, d]  all tokens in order, a share of the heads
    to_tokens    the inverse

Two all-to-alls around whatever attends, each of 1 / n of what a gather would move; backward is the
opposite exchange. Keys that are fewer than ranks are copied first, so that each rank gets the one
that its queries meet.

Source: Jacobs et al., "DeepSpeed-Ulysses", arXiv:2309.14509, section 3.
"""

from torch import Tensor

from runtime.communication import collectives
from runtime.communication.mesh import Mesh

_AXIS = "cp"


def to_heads(x: Tensor, mesh: Mesh) -> Tensor:
    """Trade a share of the tokens for a share of the heads.

    Args:
        x: [b, A, s, d]; n divides A, or A divides n (keys and values).
        mesh: Where this rank stands.

    """
    size = mesh.size(_AXIS)
    if x.shape[1] < size:
        x = x.repeat_interleave(size // x.shape[1], dim=1)
    batch, heads, length, width = x.shape
    shares = x.view(batch, size, heads // size, length, width).transpose(0, 1)
    arrived = _exchange(shares, mesh)
    return arrived.permute(1, 2, 0, 3, 4).reshape(batch, heads // size, size * length, width)


def to_tokens(x: Tensor, mesh: Mesh) -> Tensor:
    """Trade a share of the heads for a share of the tokens: the inverse of `to_heads`.

    Args:
        x: [b, A/n, n s, d].
        mesh: Where this rank stands.

    """
    size = mesh.size(_AXIS)
    batch, heads, length, width = x.shape
    shares = x.reshape(batch, heads, size, length // size, width).permute(2, 0, 1, 3, 4)
    arrived = _exchange(shares, mesh)
    return arrived.transpose(0, 1).reshape(batch, size * heads, length // size, width)


def _exchange(shares: Tensor, mesh: Mesh) -> Tensor:
    """Send share i of [n, ...] to rank i of the axis."""
    ones = (1,) * mesh.size(_AXIS)
    return collectives.all_to_all(shares.contiguous(), mesh, _AXIS, ones, ones)
