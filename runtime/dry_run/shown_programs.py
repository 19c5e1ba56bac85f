"""What a rank has shown of its program, and what a rank of an equal program does by it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from costmodels.layout import Layout
from costmodels.schedule import Action, ActionKind
from runtime.communication.grid import members
from runtime.dry_run.meter import RanRow
from runtime.dry_run.short_rows import Figures, RowReader, Situation, added
from runtime.dry_run.trackers import Message
from runtime.executor import crossing


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What is known of a program.

    Attributes:
        first: The first row that was run of it.
        situations: What actions do, by situation.
        transfers: A message across the pipeline and the action of the first row that made it, by
            kind and by the number of the stage among the rank's own.

    """

    first: RanRow
    situations: Mapping[Situation, Figures]
    transfers: Mapping[tuple[ActionKind, int], tuple[Action, Message]]

    @staticmethod
    def of(ran: RanRow, reader: RowReader) -> "Shown | None":
        """Return what a row shows; None if a situation did two things."""
        situations = reader.by_situation(ran.row, _actions(ran), {})
        transfers = {
            (action.kind, reader.number(action)): (action, message)
            for action, part in zip(ran.row, ran.parts[1:-1], strict=True)
            for message in part.messages
            if message.group == "pp"
        }
        if situations is None:
            return None
        return Shown(first=ran, situations=situations, transfers=transfers)

    def with_row(self, ran: RanRow, reader: RowReader) -> "Shown | None":
        """Add what another row of an equal program shows; None if the two differ."""
        situations = reader.by_situation(ran.row, _actions(ran), self.situations)
        if situations is None or _around(ran) != _around(self.first):
            return None
        return replace(self, situations=situations)

    def figures(self, whole: Sequence[Action], reader: RowReader) -> Figures:
        """Return what a row does whose situations are all known."""
        begin, end = self.first.parts[0], self.first.parts[-1]
        actions = [self.situations[situation] for situation in reader.situations(whole)]
        return added([begin.figures, *actions, end.figures])

    def messages(
        self, layout: Layout, rank: int, whole: Sequence[Action], reader: RowReader
    ) -> tuple[Message, ...]:
        """Return a rank's: those of its row across the pipeline, the others of the first row."""
        others = [message for message in self.first.messages if message.group != "pp"]
        if rank != self.first.rank:
            axes = {message.group for message in others}
            own, new = ({a: members(layout, r, a) for a in axes} for r in (self.first.rank, rank))
            others = [_moved(one, own[one.group], new[one.group]) for one in others]
        return (*others, *self._crossing(layout, rank, whole, reader))

    def _crossing(
        self, layout: Layout, rank: int, whole: Sequence[Action], reader: RowReader
    ) -> Iterator[Message]:
        """Return messages across the pipeline: they differ in their other end and in their tag."""
        ranks = members(layout, rank, "pp")
        for action in whole:
            if action.is_compute:
                continue
            like, message = self.transfers[action.kind, reader.number(action)]
            stage, tag = crossing(action.kind, (action.stage, action.micro_batch))
            like_stage, like_tag = crossing(like.kind, (like.stage, like.micro_batch))
            # By the difference: a message that went wrong must stay wrong.
            away = message.ranks.index(message.peer) - layout.rank_of_stage(like_stage)
            peer = ranks[(layout.rank_of_stage(stage) + away) % len(ranks)]
            tag += message.tag - like_tag
            yield replace(message, ranks=ranks, peer=peer, tag=tag)


def _actions(ran: RanRow) -> list[Figures]:
    return [part.figures for part in ran.parts[1:-1]]


def _around(ran: RanRow) -> tuple[int, Figures, Figures]:
    return ran.states, ran.parts[0].figures, ran.parts[-1].figures


def _moved(message: Message, own: tuple[int, ...], ranks: tuple[int, ...]) -> Message:
    """Return a message in a group of one rank as another rank has it in its group."""
    assert len(ranks) == len(own), f"groups {message.group} of equal programs differ in size"
    peer = ranks[own.index(message.peer)] if message.peer >= 0 else message.peer
    return replace(message, ranks=ranks, peer=peer)
