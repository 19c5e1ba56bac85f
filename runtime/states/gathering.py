"""Gathering: ZeRO-3 weights are whole only while a unit of their stage runs.

Forward: gather before a unit, free after it. Backward: the gradient that reaches a unit's output
gathers it again, and frees the unit after it. The next unit in line is gathered while this one
computes, so at most two units are whole at any time.

A stage that keeps what it gathers (`keep`) frees it after the step's last backward instead.

A unit that recomputes runs its forward a second time inside its backward; its weights are whole
by then and stay.
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from runtime.states.buckets import Bucket


class Gathering:
    """Keeps the weights of one stage whole where they are needed."""

    def __init__(
        self,
        units: Sequence[nn.Module],
        buckets: Sequence[Sequence[Bucket]],
        *,
        keep: bool = False,
        ahead: int = 1,
    ) -> None:
        """Watch the units of a stage.

        Args:
            units: In the order in which they run forward.
            buckets: The buckets that hold each unit's parameters; units may share one.
            keep: Weights stay whole until the step's last backward.
            ahead: Units that are gathered before they are needed.

        """
        self._buckets = buckets
        self._keeps = keep
        self._ahead = ahead
        self._held: set[int] = set()
        self._users: dict[Bucket, int] = {}
        self._in_backward = False
        for index, unit in enumerate(units):
            unit.register_forward_pre_hook(self._before(index))
            unit.register_forward_hook(self._after(index))

    def begin_backward(self) -> None:
        """Note that what runs from now on is backward."""
        self._in_backward = True

    def end_backward(self, *, is_final: bool) -> None:
        """Free what backward left whole, unless it is kept for the step's other passes."""
        self._in_backward = False
        if is_final or not self._keeps:
            self._free_others(set())

    def _before(self, index: int) -> Callable[..., None]:
        def hook(unit: nn.Module, arguments: object) -> None:  # noqa: ARG001  (torch's signature)
            if not self._in_backward:
                last = min(index + self._ahead, len(self._buckets) - 1)
                self._use(index, set(range(index, last + 1)))

        return hook

    def _after(self, index: int) -> Callable[..., None]:
        def hook(unit: nn.Module, arguments: object, output: Tensor) -> None:  # noqa: ARG001
            if self._in_backward:
                return
            if not self._keeps:
                self._free_others(self._held - {index})
            if output.requires_grad:
                output.register_hook(lambda _: self._enter_backward(index))  # type: ignore[no-untyped-call]

        return hook

    def _enter_backward(self, index: int) -> None:
        first = max(index - self._ahead, 0)
        self._use(index, set(range(first, index + 1)))

    def _use(self, index: int, wanted: set[int]) -> None:
        if not self._keeps:
            self._free_others(wanted & self._held)
        # The unit itself first: peers start their gathers in the same order.
        for unit in sorted(wanted - self._held, key=lambda other: abs(other - index)):
            self._hold(unit)
        for bucket in self._buckets[index]:
            bucket.wait_gather()

    def _hold(self, unit: int) -> None:
        self._held.add(unit)
        for bucket in self._buckets[unit]:
            self._users[bucket] = self._users.get(bucket, 0) + 1
            if self._users[bucket] == 1:
                bucket.start_gather()

    def _free_others(self, wanted: set[int]) -> None:
        for unit in sorted(self._held - wanted):
            self._held.remove(unit)
            for bucket in self._buckets[unit]:
                self._users[bucket] -= 1
                if not self._users[bucket]:
                    bucket.free()
