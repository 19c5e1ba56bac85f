"""ShardedStates: the parameters of a rank's stages, their gradients and who keeps what (ZeRO).

Parameters are packed into buckets (`buckets.py`); with ZeRO-3 one set per unit, so that a unit's
weights come and go together (`gathering.py`). Gradients are reduced in buckets behind the backward
that completes them, always in the same order on all ranks: from the last bucket to the first.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from costmodels.layout import Layout, Offload
from costmodels.units import MIB
from runtime import collectives
from runtime.buckets import Bucket, Sharing
from runtime.gathering import Gathering
from runtime.mesh import Mesh
from runtime.program import ParameterShard, Program, StageModule

# Large enough that a link's latency does not show, small enough to hide behind a layer's backward.
# Chosen; DDP's default is 25 MiB.
BUCKET_BYTES = 32 * MIB

# Ranks that share gradients, cut a state and own the same piece of it; experts have fewer copies.
DENSE_AXES = ("dp_cp", "zero", "zero_replicas")
EXPERT_AXES = ("edp", "expert_zero", "expert_zero_replicas")

Named = tuple[ParameterShard, nn.Parameter]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precisions:
    """Number formats of the states.

    Attributes:
        gradients: What gradients are summed and kept in.
        master: What the optimizer updates; the weights' own format means no separate copy.

    """

    gradients: torch.dtype
    master: torch.dtype


class ShardedStates:
    """All states of one rank's program."""

    def __init__(
        self,
        program: Program,
        mesh: Mesh,
        precisions: Precisions,
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Take over the program's parameters, which must have their values."""
        self._mesh = mesh
        self._precisions = precisions
        self._stages = {
            stage.index: StageStates(stage, mesh, precisions, bucket_bytes)
            for stage in program.stages
        }

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """All buckets of the rank, in model order."""
        return tuple(b for stage in self._stages.values() for b in stage.buckets)

    def begin_backward(self, stage: int, *, is_final: bool = False, is_whole: bool = True) -> None:
        """Prepare a stage for a backward pass.

        Args:
            stage: Global index.
            is_final: The pass completes the step's gradients of the stage.
            is_whole: The pass completes those of its micro-batch; the first half of a split
                backward does not, and nothing is reduced behind it.

        """
        self._stages[stage].begin_backward(is_final=is_final, is_whole=is_whole)

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
                total += torch.linalg.vector_norm(bucket.gradients, dtype=dtype).square()
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
        """Carry the optimizer's update into the weights of every rank."""
        for bucket in self.buckets:
            bucket.start_publish()
        for bucket in self.buckets:
            bucket.wait_gather()


class StageStates:
    """The buckets of one stage and the hooks that fill them."""

    def __init__(
        self, stage: StageModule, mesh: Mesh, precisions: Precisions, bucket_bytes: int
    ) -> None:
        """Pack the stage's parameters."""
        ways = max(mesh.size("zero"), mesh.size("expert_zero"))
        comes_and_goes = ways > 1 or Offload.PARAMETERS in mesh.layout.offload
        per_unit = mesh.layout.zero_stage == 3 and comes_and_goes  # noqa: PLR2004
        limit = 0 if per_unit else bucket_bytes
        self.buckets = tuple(
            Bucket(
                run,
                _sharing(run[0][0], stage, mesh),
                grad_dtype=precisions.gradients,
                master_dtype=precisions.master,
            )
            for run in _runs(_new_parameters(stage), limit)
        )
        self._cuts_gradients = any(b.sharing.cuts("gradients") for b in self.buckets)
        self._waiting: list[set[int]] = []
        self._next = -1
        self._reduces = False
        self._is_final = False
        for bucket in range(len(self.buckets)):
            self._watch(bucket)
        self._gathering = self._gather_units(stage) if per_unit else None

    def begin_backward(self, *, is_final: bool, is_whole: bool) -> None:
        """Expect one gradient of every parameter."""
        self._reduces = is_final or (is_whole and self._cuts_gradients)
        self._is_final = is_final
        self._waiting = [set(range(len(bucket.parameters))) for bucket in self.buckets]
        self._next = len(self.buckets) - 1
        if self._gathering is not None:
            self._gathering.begin_backward()

    def end_backward(self) -> None:
        """Reduce the buckets that still wait for a gradient: a parameter may not have been used."""
        if self._gathering is not None:
            self._gathering.end_backward()
        if not self._reduces:
            return
        while self._next >= 0:
            self._reduce_next()
        if self._cuts_gradients:
            for bucket in self.buckets:
                bucket.wait_reduce()

    def _watch(self, bucket: int) -> None:
        for index, parameter in enumerate(self.buckets[bucket].parameters):
            hook = self._collect(bucket, index)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _collect(self, bucket: int, index: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if parameter.grad is None:  # autograd came by without one: it was put off
                return
            self.buckets[bucket].collect(index)
            self._waiting[bucket].discard(index)
            if self._reduces:
                while self._next >= 0 and not self._waiting[self._next]:
                    self._reduce_next()

        return hook

    def _reduce_next(self) -> None:
        bucket = self.buckets[self._next]
        if self._is_final or bucket.sharing.cuts("gradients"):  # others accumulate in place
            bucket.start_reduce()
        self._next -= 1

    def _gather_units(self, stage: StageModule) -> Gathering:
        # Experts may be cut where dense weights are not, and the other way round.
        cut = [bucket for bucket in self.buckets if bucket.sharing.cuts("weights")]
        holder = {id(p): bucket for bucket in cut for p in bucket.parameters}
        of_units = [
            tuple(dict.fromkeys(holder[id(p)] for p in unit.parameters() if id(p) in holder))
            for unit in stage.units
        ]
        return Gathering(list(stage.units), of_units)


def _new_parameters(stage: StageModule) -> Iterable[list[Named]]:
    """Yield each unit's parameters, without those that an earlier unit shares."""
    seen: set[int] = set()
    for unit in stage.units:
        fresh = [(name, p) for name, p in unit.named_parameters() if id(p) not in seen]
        seen.update(id(p) for _, p in fresh)
        yield [(stage.shard(name), p) for name, p in fresh]


def _runs(units: Iterable[Sequence[Named]], limit: int) -> list[list[Named]]:
    """Group parameters that may share a bucket, unit by unit, up to a number of bytes."""
    closed: list[list[Named]] = []
    opened: dict[tuple[object, ...], list[Named]] = {}
    for unit in units:
        for shard, parameter in unit:
            sums = (shard.gradient_sum_axes, shard.tied_stages)
            key = (shard.axis, shard.block_axis, *sums, parameter.dtype)
            opened.setdefault(key, []).append((shard, parameter))
        full = [key for key, run in opened.items() if _num_bytes(run) >= limit]
        closed.extend(opened.pop(key) for key in full)
    return closed + list(opened.values())


def _has_both_ends(bucket: Bucket) -> bool:
    return any(group.axis == "ends" and group.size == 1 for group in bucket.sharing.copies)


def _num_bytes(run: Sequence[Named]) -> int:
    return sum(parameter.numel() * parameter.element_size() for _, parameter in run)


def _sharing(shard: ParameterShard, stage: StageModule, mesh: Mesh) -> Sharing:
    copies = [mesh.group(axis) for axis in shard.gradient_sum_axes]
    if shard.tied_stages:
        copies.append(mesh.group("ends"))
    axes = DENSE_AXES if shard.block_axis is None else EXPERT_AXES
    data, zero, replicas = (mesh.group(axis) for axis in axes)
    zero_stage = mesh.layout.zero_stage
    cuts = zero_stage > 0 and zero.size > 1
    is_first_copy = (replicas if cuts else data).index == 0
    is_cut = shard.axis is not None or mesh.coordinate("tp") == 0
    is_owner = not shard.tied_stages or stage.index == min(shard.tied_stages)
    return Sharing(
        zero_stage=zero_stage,
        data=data,
        zero=zero,
        replicas=replicas,
        copies=tuple(copies),
        is_counted=is_first_copy and is_cut and is_owner,
        is_owner=is_owner,
        on_host=_on_host(mesh.layout),
    )


def _on_host(layout: Layout) -> frozenset[str]:
    if Offload.PARAMETERS in layout.offload:
        return frozenset({"optimizer", "weights"})
    return frozenset({"optimizer"}) if Offload.OPTIMIZER in layout.offload else frozenset()
