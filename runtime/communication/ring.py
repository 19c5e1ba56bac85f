"""One step around the ring of a group: every rank hands a tensor to the next one.

Beside `collectives`, whose torch names end there; a module of its own because only attention over
a split sequence passes things around.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.communication.collectives import watch_of
from runtime.communication.mesh import Group
from runtime.communication.pending import Pending


def start_shift(x: Tensor, group: Group, tag: int) -> Pending:
    """Begin to pass a tensor to the next rank; the result is the previous rank's.

    Send and receive begin as one batch: NCCL would wait for ever if every rank sent first.

    Args:
        x: Contiguous; stays as it is until the wait.
        group: Ranks of the ring, in their order; at least two.
        tag: Keeps apart what is under way at the same time.

    """
    received = torch.empty_like(x)
    watch = watch_of(group, "shift", x)
    following, previous = (group.index + 1) % group.size, (group.index - 1) % group.size
    batch = [
        dist.P2POp(dist.isend, x, group=group.handle, tag=tag, group_peer=following),
        dist.P2POp(dist.irecv, received, group=group.handle, tag=tag, group_peer=previous),
    ]
    return Pending(dist.batch_isend_irecv(batch), received, keep=x).watched_by(watch)
