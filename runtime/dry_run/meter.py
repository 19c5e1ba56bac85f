"""What each action of a row does, read off a tracker while an executor runs the row."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from costmodels.schedule import Action
from runtime.dry_run.short_rows import Figures
from runtime.dry_run.trackers import Message, Tracker


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a step.

    Attributes:
        messages: Sent and received in it, in order.

    """

    figures: Figures
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RanRow:
    """A row that a rank was run with.

    Attributes:
        rank: Global.
        states: Bytes that it holds between steps, batches included.
        row: Its actions.
        parts: What goes before the first action, the actions, what goes behind the last one.

    """

    rank: int
    states: int
    row: tuple[Action, ...]
    parts: tuple[Part, ...]

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages, in order."""
        return tuple(message for part in self.parts for message in part.messages)


class Meter:
    """Divides what a tracker counts among the actions of a row, and what goes before and after.

    Attributes:
        parts: Read off so far: what goes before the first action, then the actions.

    """

    def __init__(self, tracker: Tracker, axes: Mapping[str, str]) -> None:
        """Begin.

        Args:
            tracker: What counts; its figures start anew.
            axes: Of the mesh, by torch's names of their groups.

        """
        self.parts: list[Part] = []
        self._tracker = tracker
        self._axes = axes
        self._start()

    @contextmanager
    def action(self, name: str) -> Iterator[None]:  # noqa: ARG002  (as an executor calls it)
        """Read an action off."""
        if not self.parts:
            self.cut()
        yield
        self.cut()

    def cut(self) -> None:
        """End a part here and begin the next one."""
        tracker, begin = self._tracker, self._begin
        by_group = tracker.bytes_by_group()
        figures = Figures(
            flops=tracker.flops,
            num_bytes=Counter({self._axes[group]: count for group, count in by_group.items()}),
            rise=tracker.peak - begin,
            change=tracker.live - begin,
        )
        # Under the names of their axes, not of torch's groups.
        messages = tuple(replace(one, group=self._axes[one.group]) for one in tracker.messages)
        self.parts.append(Part(figures=figures, messages=messages))
        self._start()

    def _start(self) -> None:
        self._tracker.flops, self._tracker.messages = 0, []
        self._tracker.reset_peak()
        self._begin = self._tracker.live
