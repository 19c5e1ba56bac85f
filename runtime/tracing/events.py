"""What a rank does when: its actions, and the transfers behind them, for a picture of a run.

    trace = Trace(device, first_step=2, num_steps=1)
    mesh = observed(mesh, trace)              every transfer of the mesh's groups tells it
    Executor(..., trace=trace)                every action does

A transfer lasts from its start until somebody has waited for it; the wait itself is noted apart,
so that what computation hides is what is left of the transfer. On a GPU times are those at which
the stream of the computation gets there (CUDA events), on a CPU those of the clock. Nothing is
noted outside of the steps that are asked for.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import torch

from runtime.communication.mesh import Mesh

Mark: TypeAlias = "float | torch.cuda.Event"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that took time on a rank.

    Attributes:
        name: "2F0" for an action (stage 2, forward of micro-batch 0), or an operation.
        kind: "step", "action", "transfer" or "wait".
        axis: Of a transfer or of the wait for it.
        num_bytes: Of a transfer.
        start: Seconds since 1970.

    """

    name: str
    kind: str
    axis: str
    num_bytes: int
    start: float
    seconds: float


class Transfer:
    """A transfer under way; told when somebody waits for it and when the wait is over."""

    def __init__(self, trace: "Trace", name: str, axis: str, num_bytes: int) -> None:
        """Begin."""
        self._trace, self._name, self._axis, self._num_bytes = trace, name, axis, num_bytes
        self._start = trace.mark()
        self._waiting: Mark | None = None

    def waiting(self) -> None:
        """Note that somebody waits."""
        self._waiting = self._trace.mark()

    def done(self) -> None:
        """Note that the wait is over."""
        end = self._trace.mark()
        assert self._waiting is not None
        self._trace.add(self._name, "transfer", self._axis, self._num_bytes, (self._start, end))
        self._trace.add(f"wait {self._name}", "wait", self._axis, 0, (self._waiting, end))


class ActionWatch(Protocol):
    """Whoever wants to know when an executor runs an action."""

    def action(self, name: str) -> AbstractContextManager[None]:
        """Return a context that the action runs in."""


class Trace:
    """Collects a rank's events of a few steps."""

    def __init__(self, device: torch.device, *, first_step: int = 0, num_steps: int = 1) -> None:
        """Note what happens in `num_steps` steps from `first_step` on."""
        self._on_gpu = device.type == "cuda"
        self._steps = range(first_step, first_step + num_steps)
        self._is_on = False
        self._step: tuple[int, Mark] | None = None
        self._noted: list[tuple[str, str, str, int, tuple[Mark, Mark]]] = []
        self._zero: tuple[float, Mark] | None = None

    def move(self, num_done: int) -> None:
        """Count the first step from where a run begins: so many steps are done."""
        first = self._steps.start + num_done
        self._steps = range(first, first + len(self._steps))

    def begin_step(self, step: int) -> None:
        """Note from here on, where the step is one of those asked for."""
        self._is_on = step in self._steps
        if not self._is_on:
            return
        if self._zero is None:
            if self._on_gpu:
                torch.cuda.synchronize()
            self._zero = time.time(), self.mark()
        self._step = step, self.mark()

    def end_step(self) -> None:
        """Note the step and stop."""
        if self._step is not None:
            step, start = self._step
            self.add(f"step {step}", "step", "", 0, (start, self.mark()))
        self._is_on, self._step = False, None

    @contextmanager
    def action(self, name: str) -> Iterator[None]:
        """Note an action."""
        if not self._is_on:
            yield
            return
        start = self.mark()
        yield
        self.add(name, "action", "", 0, (start, self.mark()))

    def transfer(self, name: str, axis: str, num_bytes: int) -> Transfer | None:
        """Begin to note a transfer; None where nothing is noted."""
        return Transfer(self, name, axis, num_bytes) if self._is_on else None

    def mark(self) -> Mark:
        """Return this moment."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
        event.record()
        return event

    def add(self, name: str, kind: str, axis: str, num_bytes: int, span: tuple[Mark, Mark]) -> None:
        """Note what took time."""
        self._noted.append((name, kind, axis, num_bytes, span))

    def events(self) -> list[Event]:
        """Return everything noted, in the order in which it ended."""
        if self._zero is None:
            return []
        if self._on_gpu:
            torch.cuda.synchronize()
        clock, zero = self._zero
        return [
            Event(
                name=name,
                kind=kind,
                axis=axis,
                num_bytes=num_bytes,
                start=clock + _seconds(zero, start),
                seconds=_seconds(start, end),
            )
            for name, kind, axis, num_bytes, (start, end) in self._noted
        ]


def observed(mesh: Mesh, trace: Trace) -> Mesh:
    """Return a mesh whose groups tell a trace of every transfer."""
    groups = {axis: replace(group, trace=trace) for axis, group in mesh.groups.items()}
    return replace(mesh, groups=groups)


def _seconds(start: Mark, end: Mark) -> float:
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    return float(start.elapsed_time(end)) / 1000
