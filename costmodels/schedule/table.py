"""ScheduleTable: a pipeline schedule as data, one row of actions per rank; three readers.

The cost model simulates a table, the runtime executes a rank's row, the plan stores the rows as
action strings. Rows hold integers rather than `Action` records, since tables of tens of thousands
of actions are simulated while a search runs:

    code = (kind * num_stages + stage) * num_micro_batches + micro_batch
"""

from collections.abc import Sequence
from dataclasses import dataclass

from costmodels.schedule.action import KINDS, Action, ActionKind, parse_action
from costmodels.schedule.shape import PipelineShape

Row = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleTable:
    """Actions of every pipeline rank, each in the order in which that rank starts them.

    Attributes:
        shape: Schedule and sizes.
        rows: Codes of one rank's actions, by rank.

    """

    shape: PipelineShape
    rows: tuple[Row, ...]

    def encode(self, action: Action) -> int:
        """Return the code of an action."""
        return encode(self.shape, action.kind, action.stage, action.micro_batch)

    def decode(self, code: int) -> Action:
        """Return the action of a code."""
        place, micro_batch = divmod(code, self.shape.num_micro_batches)
        kind, stage = divmod(place, self.shape.num_stages)
        return Action(stage, KINDS[kind], micro_batch)

    def actions(self, rank: int) -> tuple[Action, ...]:
        """Return the actions of one rank, in order."""
        return tuple(map(self.decode, self.rows[rank]))

    def strings(self) -> tuple[tuple[str, ...], ...]:
        """Return all rows as torch's action strings."""
        return tuple(tuple(map(str, self.actions(rank))) for rank in range(len(self.rows)))


def encode(shape: PipelineShape, kind: ActionKind, stage: int, micro_batch: int = 0) -> int:
    """Return the code of an action; codes of later micro-batches follow one by one."""
    return (KINDS.index(kind) * shape.num_stages + stage) * shape.num_micro_batches + micro_batch


def table_from_strings(shape: PipelineShape, rows: Sequence[Sequence[str]]) -> ScheduleTable:
    """Read rows of action strings, the inverse of `ScheduleTable.strings`.

    Raises:
        ValueError: A string is no action, or names a stage or micro-batch that the shape lacks,
            or the number of rows is not the number of ranks.

    """
    if len(rows) != shape.pipeline_parallel:
        raise ValueError(f"{len(rows)} rows for {shape.pipeline_parallel} pipeline ranks")
    return ScheduleTable(
        shape=shape, rows=tuple(tuple(_read(shape, text) for text in row) for row in rows)
    )


def _read(shape: PipelineShape, text: str) -> int:
    action = parse_action(text)
    if action.stage >= shape.num_stages or action.micro_batch >= shape.num_micro_batches:
        raise ValueError(
            f"{text} is outside the schedule: {shape.num_stages} stages, "
            f"{shape.num_micro_batches} micro-batches, both counted from 0"
        )
    return encode(shape, action.kind, action.stage, action.micro_batch)


def format_grid(table: ScheduleTable, mark: tuple[int, int] | None = None, context: int = 6) -> str:
    """Draw a table as steps down and ranks across, as people read a schedule.

    Args:
        table: What to draw.
        mark: Rank and step of an action to point at; only steps near it are drawn.
        context: Steps drawn on either side of the mark.

    """
    last = max(map(len, table.rows))
    first = 0
    if mark is not None:
        first, last = max(0, mark[1] - context), min(last, mark[1] + context + 1)

    def cell(rank: int, step: int) -> str:
        row = table.rows[rank]
        text = str(table.decode(row[step])) if step < len(row) else ""
        return f"[{text}]" if (rank, step) == mark else text

    ranks = range(len(table.rows))
    lines = [["step", *(f"rank {rank}" for rank in ranks)]]
    lines += [[str(step), *(cell(rank, step) for rank in ranks)] for step in range(first, last)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    drawn = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    if mark is not None:
        drawn[1 + mark[1] - first] += "   <-- here"
    return "\n".join(drawn)
