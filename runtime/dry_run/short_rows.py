"""A short row from which a long one follows, for one rank of a pipeline.

What an action does (FLOPs, bytes, storage that it makes and lets go) depends on its situation:
stage and kind, whether it is the first or last of them in the step, and what ran on the stage
before it. Hundreds of micro-batches meet the same few situations. So a row of some micro-batches is
run, in which every situation of the whole row occurs, and the whole row is added up by action:

    FLOPs, bytes   of each action's situation
    peak           live storage follows each action's change; the most that it held meanwhile

Micro-batches are left out whole and the others keep their order, so that actions that follow each
other in the whole row on one stage still do. That a situation says all there is to say is checked
in every run: where it occurs twice, both must have done the same, or the whole row is run.
"""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from costmodels.layout import Layout
from costmodels.schedule import Action, ActionKind
from costmodels.schedule.action import COMPUTE_KINDS
from runtime.executor import MOST_SENT

_SENDS = (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD)
_LEAST_SHOWN = 2  # of what computes, so that a difference within a situation would be seen
_BACKWARDS = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)


class Situation(NamedTuple):
    """All that decides what an action does, but for the values in its tensors.

    Attributes:
        kind: Of the action; of a send that waits for an earlier one, that one's, whose tensor goes.
        stage: Likewise; its number among the rank's own.
        is_first: No action of this kind has run on the stage (gradients are copied, not added).
        is_last: None will (gradients are complete).
        before: What ran on the stage before it, whose weights may still be gathered; None where
            weights stay whole.
        half: The last backward on the stage, a first half of which leaves gradients that the next
            one meets; None where gradients have a place all the time.
        waits: Whether a send waits for an earlier one.

    """

    kind: ActionKind
    stage: int
    is_first: bool = False
    is_last: bool = False
    before: ActionKind | None = None
    half: ActionKind | None = None
    waits: bool = False


class _Seen(NamedTuple):
    """An action's situation, and the micro-batches that must stay for it to remain in this one."""

    situation: Situation
    micro_batches: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was read off a part of a step.

    Attributes:
        flops: Executed.
        num_bytes: By axis of the mesh.
        rise: Bytes of live storage at the part's highest point, over its beginning.
        change: Bytes of live storage at its end, over its beginning.

    """

    flops: int
    num_bytes: Counter[str]
    rise: int
    change: int


def added(parts: Sequence[Figures]) -> Figures:
    """Return the figures of parts that follow each other."""
    flops, num_bytes, rise, live = 0, Counter[str](), 0, 0
    for part in parts:
        flops += part.flops
        num_bytes.update(part.num_bytes)
        rise = max(rise, live + part.rise)
        live += part.change
    return Figures(flops=flops, num_bytes=num_bytes, rise=rise, change=live)


class RowReader:
    """Tells situations in the rows of one rank apart."""

    def __init__(self, layout: Layout, place: int) -> None:
        """Look at the rank at a place of the pipeline, and at what of its states comes and goes."""
        self._number = {stage: i for i, stage in enumerate(layout.stages_of_rank(place))}
        self._gradients_come_and_go = layout.zero_stage >= 2  # noqa: PLR2004
        self._weights_come_and_go = layout.zero_stage >= 3  # noqa: PLR2004

    def number(self, action: Action) -> int:
        """Return the number of an action's stage among the rank's own."""
        return self._number[action.stage]

    def situations(self, row: Sequence[Action]) -> list[Situation]:
        """Return the situation of each action of a row."""
        return [seen.situation for seen in self._look_at(row)]

    def by_situation(
        self,
        row: Sequence[Action],
        figures: Sequence[Figures],
        known: Mapping[Situation, Figures],
    ) -> Mapping[Situation, Figures] | None:
        """Add what was read off a row to what is known; None if one situation did two things."""
        found = dict(known)
        for situation, part in zip(self.situations(row), figures, strict=True):
            if found.setdefault(situation, part) != part:
                return None
        return found

    def short_row(
        self, row: Sequence[Action], known: Container[Situation] = frozenset()
    ) -> tuple[Action, ...]:
        """Return the row of some micro-batches that show every situation that is not known yet.

        Where states stay, situations are few, and what computes is shown twice if it occurs twice.
        """
        least = 1 if self._gradients_come_and_go else _LEAST_SHOWN
        choices: dict[Situation, list[frozenset[int]]] = {}
        looked = self._look_at(row)
        for seen in looked:
            if seen.situation not in known:
                choices.setdefault(seen.situation, []).append(seen.micro_batches)
        kept: set[int] = set()
        if choices:  # without the first and the last ones, known or not, others would be these
            ends = (seen for seen in looked if seen.situation.is_first or seen.situation.is_last)
            kept.update(*(seen.micro_batches for seen in ends))
        # Those that few moments show first: they leave no choice.
        for situation, moments in sorted(choices.items(), key=lambda choice: len(choice[1])):
            wanted = min(len(moments), least if situation.kind in COMPUTE_KINDS else 1)
            shown = [needed for needed in moments if needed <= kept]
            others = [needed for needed in moments if not needed <= kept]
            for _ in range(wanted - len(shown)):
                best = min(others, key=lambda needed: (len(needed - kept), sorted(needed)))
                others.remove(best)
                kept |= best
        return tuple(action for action in row if action.micro_batch in kept)

    def _look_at(self, row: Sequence[Action]) -> list[_Seen]:
        last = {(action.stage, action.kind): place for place, action in enumerate(row)}
        ran: set[tuple[int, ActionKind]] = set()
        computed: dict[int, Action] = {}
        backward: dict[int, Action] = {}
        sent: list[Action] = []
        looked: list[_Seen] = []
        for place, action in enumerate(row):
            key = (action.stage, action.kind)
            met: list[Action] = []
            situation = Situation(action.kind, self.number(action))
            if action.is_compute:
                before = computed.get(action.stage) if self._weights_come_and_go else None
                half = backward.get(action.stage) if self._gradients_come_and_go else None
                met = [one for one in (before, half) if one is not None]
                situation = situation._replace(
                    is_first=key not in ran,
                    is_last=last[key] == place,
                    before=None if before is None else before.kind,
                    half=None if half is None else half.kind,
                )
                ran.add(key)
                computed[action.stage] = action
                if action.kind in _BACKWARDS:
                    backward[action.stage] = action
            elif action.kind in _SENDS:
                met = sent[-MOST_SENT:]
                if len(met) == MOST_SENT:
                    situation = Situation(met[0].kind, self.number(met[0]), waits=True)
                sent.append(action)
            micro_batches = frozenset(one.micro_batch for one in (action, *met))
            looked.append(_Seen(situation, micro_batches))
        return looked
