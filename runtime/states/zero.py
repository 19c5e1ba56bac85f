"""ShardedStates: the parameters of a rank's stages, their gradients and who keeps what (ZeRO).

Parameters are packed into buckets (`packing.py`, `buckets.py`); with ZeRO-2 and ZeRO-3 one set per
unit, so that a unit's gradients and weights come and go together (`gathering.py`). Gradients are
reduced in buckets behind the backward that completes them (`stage_states.py`), always in the same
order on all ranks.
"""

import torch
from torch import Tensor

from costmodels.counts.buckets import BUCKET_BYTES
from runtime.communication import collectives
from runtime.communication.mesh import Mesh
from runtime.program import Program
from runtime.split_backward import Half
from runtime.states.buckets import Bucket
from runtime.states.first_values import Initialiser, move_buffers, own_piece
from runtime.states.packing import Precisions
from runtime.states.stage_states import StageStates

__all__ = ["Precisions", "ShardedStates"]

NORM_ROW = 65_536  # chosen: elements whose squares are added one by one


class ShardedStates:
    """All states of one rank's program."""

    def __init__(
        self,
        program: Program,
        mesh: Mesh,
        precisions: Precisions,
        *,
        initialise: Initialiser | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Take over the program's parameters.

        Args:
            program: Its parameters have their values, or lie on meta.
            mesh: Where this rank stands.
            precisions: Formats of the states.
            initialise: Makes parameters for a program on meta, one after the other: with ZeRO-3,
                and one that can make pieces, a rank never holds more than its tensor-parallel
                piece of one unit's weights.
            bucket_bytes: Parameters are grouped up to this size.

        """
        self._mesh = mesh
        self._precisions = precisions
        move_buffers(program, mesh.device)
        make = None if initialise is None else lambda shard: own_piece(initialise, shard, mesh)
        self._stages = {
            stage.index: StageStates(stage, mesh, precisions, make, bucket_bytes)
            for stage in program.stages
        }

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """All buckets of the rank, in model order."""
        return tuple(b for stage in self._stages.values() for b in stage.buckets)

    def begin_backward(
        self, stage: int, half: Half | None = None, *, is_final: bool = False
    ) -> None:
        """Prepare a stage for a backward pass.

        Args:
            stage: Global index.
            half: Of a split backward; None for a whole one.
            is_final: The pass completes the step's gradients of the stage.

        """
        self._stages[stage].begin_backward(half, is_final=is_final)

    def end_backward(self, stage: int) -> None:
        """Start what the backward pass has left to reduce, and free gathered weights."""
        self._stages[stage].end_backward()

    def finish_gradients(self) -> None:
        """Complete the gradients of the step on every rank."""
        for stage in reversed(self._stages.values()):
            for bucket in reversed(stage.buckets):
                bucket.finish_reduce()
        self._sum_ties()

    def _sum_ties(self) -> None:
        """Add the gradients of a tied parameter whose two stages lie on this rank."""
        tied = [bucket for bucket in self.buckets if _has_both_ends(bucket)]
        for first, last in zip(tied[: len(tied) // 2], tied[len(tied) // 2 :], strict=True):
            assert first.gradients is not None
            assert last.gradients is not None
            first.gradients.add_(last.gradients)
            last.gradients.copy_(first.gradients)

    def gradient_norm(self) -> Tensor:
        """Return the 2-norm of the whole model's gradient; each element counts once."""
        dtype = torch.promote_types(self._precisions.gradients, torch.float32)
        total = torch.zeros((), dtype=dtype, device=self._mesh.device)
        for bucket in self.buckets:
            assert bucket.gradients is not None
            if bucket.sharing.is_counted:
                total += sum_of_squares(bucket.gradients, dtype)
        return collectives.all_reduce(total, self._mesh.group("world")).sqrt()

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply all gradients of the step."""
        for bucket in self.buckets:
            assert bucket.gradients is not None
            bucket.gradients.mul_(factor)

    def clear_gradients(self) -> None:
        """Forget the step's gradients."""
        for bucket in self.buckets:
            bucket.clear_gradients()

    def publish(self) -> None:
        """Begin to carry the optimizer's update into the weights of every rank.

        First needed, first sent. The next forward of a unit waits for the unit's own weights, so
        that they travel behind the forwards before it. Whoever reads weights otherwise, or lets go
        of the states, waits for all of them (`wait_weights`): gloo is stuck where the memory of a
        transfer under way is gone.
        """
        for bucket in self.buckets:
            bucket.start_publish()

    def wait_weights(self) -> None:
        """Complete the weights that are on their way."""
        for bucket in self.buckets:
            bucket.wait_gather()


def _has_both_ends(bucket: Bucket) -> bool:
    return any(group.axis == "ends" and group.size == 1 for group in bucket.sharing.copies)


def sum_of_squares(flat: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of squares of a flat tensor, row by row.

    torch's norm on the CPU adds fp32 numbers one by one: of 19 million it loses 7e-4, so that the
    norm would depend on how ZeRO cuts the gradients. Rows of 65,536 lose 1e-6.
    """
    whole = flat.numel() // NORM_ROW * NORM_ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, NORM_ROW), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=dtype)
    total: Tensor = rows.square().sum() + rest.square()
    return total
