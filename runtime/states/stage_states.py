"""StageStates: the buckets of one stage, filled and reduced behind its backward.

Hooks hand each parameter's gradient to its bucket; a bucket whose last gradient came is reduced
while backward goes on. Buckets go from the last to the first, whatever comes first, so that all
ranks exchange in the same order. Weights that ZeRO-1 and 2 gather after the step are waited for by
the unit that needs them, in the next step's first forward.
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from costmodels.layout import Offload
from runtime.communication.mesh import Mesh
from runtime.program import StageModule
from runtime.split_backward import Half
from runtime.states.buckets import Bucket, Values
from runtime.states.gathering import Gathering
from runtime.states.packing import Precisions, new_parameters, runs, share_by_name, sharing_of


class StageStates:
    """The buckets of one stage and the hooks that fill them."""

    def __init__(
        self,
        stage: StageModule,
        mesh: Mesh,
        precisions: Precisions,
        values: Values | None,
        bucket_bytes: int,
    ) -> None:
        """Pack the stage's parameters."""
        share_by_name(stage)
        ways = max(mesh.size("zero"), mesh.size("expert_zero"))
        comes_and_goes = ways > 1 or Offload.PARAMETERS in mesh.layout.offload
        # A bucket of several small units would hold the whole gradients of all of them at once.
        per_unit = mesh.layout.zero_stage >= 2 and comes_and_goes  # noqa: PLR2004  (gradients)
        limit = 0 if per_unit else bucket_bytes
        self.buckets = tuple(
            Bucket(
                run,
                sharing_of(run[0][0], stage, mesh),
                grad_dtype=precisions.gradients,
                master_dtype=precisions.master,
                values=values,
            )
            for run in runs(new_parameters(stage), limit)
        )
        self._cuts_gradients = any(b.sharing.cuts("gradients") for b in self.buckets)
        self._waiting: list[set[int]] = []
        self._half: Half | None = None
        # Parameters whose gradients the first half of a split backward gives.
        self._come_first: list[set[int]] = [set() for _ in self.buckets]
        self._next = -1
        self._reduces = False
        self._is_final = False
        for bucket in range(len(self.buckets)):
            self._watch(bucket)
        self._gathering = self._gather_units(stage) if per_unit else None
        self._wait_at_first_use(stage)

    def begin_backward(self, half: Half | None, *, is_final: bool) -> None:
        """Expect one gradient of every parameter, of those that a half of a backward gives."""
        self._half = half
        self._reduces = half is not Half.INPUT and (is_final or self._cuts_gradients)
        self._is_final = is_final
        self._waiting = [set(range(len(bucket.parameters))) for bucket in self.buckets]
        if half is Half.WEIGHT:
            pairs = zip(self._waiting, self._come_first, strict=True)
            self._waiting = [every - first for every, first in pairs]
        self._next = len(self.buckets) - 1
        if self._gathering is not None:
            self._gathering.begin_backward()

    def end_backward(self) -> None:
        """Reduce the buckets that still wait for a gradient: a parameter may not have been used."""
        if self._gathering is not None:
            self._gathering.end_backward(is_final=self._is_final)
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
            if self._half is Half.INPUT:
                # One that is put off has a gradient too, of an earlier micro-batch, where it is
                # added up in place.
                if self.buckets[bucket].awaits(index):
                    self._come_first[bucket].add(index)
                self.buckets[bucket].collect_early(index)
                return
            self.buckets[bucket].collect(index)
            self._waiting[bucket].discard(index)
            if self._reduces:
                while self._next >= 0 and not self._waiting[self._next]:
                    self._reduce_next()

        return hook

    def _reduce_next(self) -> None:
        bucket = self.buckets[self._next]
        if self._cuts_gradients and self._next + 1 < len(self.buckets):
            # Its whole gradients go before more than the next ones have come: without this wait
            # all of them would live to the end of the pass, and cutting them would save nothing.
            self.buckets[self._next + 1].wait_reduce()
        if self._is_final or bucket.sharing.cuts("gradients"):  # others accumulate in place
            bucket.start_reduce()
        self._next -= 1

    def _gather_units(self, stage: StageModule) -> Gathering:
        # Experts may be cut where dense weights are not, and the other way round.
        cut = [bucket for bucket in self.buckets if bucket.sharing.cuts("weights")]
        units, buckets = list(stage.units), _of_units(stage, cut)
        return Gathering(units, buckets, keep=stage.mesh.layout.keep_gathered)

    def _wait_at_first_use(self, stage: StageModule) -> None:
        """Let each unit wait for its updated weights, which come while units before it run."""
        gathered = [bucket for bucket in self.buckets if bucket.sharing.is_published]
        for unit, buckets in zip(stage.units, _of_units(stage, gathered), strict=True):
            if buckets:
                unit.register_forward_pre_hook(_wait_for(buckets))


def _of_units(stage: StageModule, buckets: Sequence[Bucket]) -> list[tuple[Bucket, ...]]:
    """Return those of some buckets that each unit's parameters lie in."""
    holder = {id(p): bucket for bucket in buckets for p in bucket.parameters}
    return [
        tuple(dict.fromkeys(holder[id(p)] for p in unit.parameters() if id(p) in holder))
        for unit in stage.units
    ]


def _wait_for(buckets: Sequence[Bucket]) -> Callable[..., None]:
    def hook(unit: nn.Module, arguments: object) -> None:  # noqa: ARG001  (torch's signature)
        for bucket in buckets:
            bucket.wait_gather()

    return hook
