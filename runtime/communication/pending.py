"""Pending: a result that a transfer will have filled in by the time someone waits for it."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor


class Work(Protocol):
    """What torch.distributed returns for an asynchronous operation."""

    def wait(self) -> object:
        """Block until the operation is done, or raise what went wrong."""

    def is_completed(self) -> bool:
        """Return whether waiting would not block."""


class Watch(Protocol):
    """Whoever wants to know when a transfer was waited for."""

    def waiting(self) -> None:
        """Note that somebody waits."""

    def done(self) -> None:
        """Note that the wait is over."""


class Pending:
    """A tensor that is complete after `wait`.

    Holds its inputs until then: freeing the memory of a transfer under way corrupts it.
    """

    def __init__(
        self,
        works: Sequence[Work | None],
        result: Tensor,
        *,
        keep: Tensor | None = None,
        finish: Callable[[], Tensor] | None = None,
    ) -> None:
        """Remember the operations, the tensor that they fill and what remains to do."""
        self._works = works
        self._result = result
        self._keep = keep
        self._finish = finish
        self._watch: Watch | None = None

    def watched_by(self, watch: Watch | None) -> "Pending":
        """Tell somebody of the first wait, and return itself."""
        self._watch = watch
        return self

    def is_done(self) -> bool:
        """Return whether waiting would not block."""
        return all(work is None or work.is_completed() for work in self._works)

    def wait(self) -> Tensor:
        """Return the tensor once everything arrived; later calls return it at once."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.waiting()
        for work in self._works:
            if work is not None:  # torch: this rank takes no part
                work.wait()
        if self._finish is not None:
            self._result = self._finish()
        self._works, self._keep, self._finish = (), None, None
        if watch is not None:
            watch.done()
        return self._result


class Done(Pending):
    """A result that needs no transfer."""

    def __init__(self, result: Tensor) -> None:
        """Hold the result."""
        super().__init__((), result)
