"""trace.json: a run as Chrome and Perfetto show it (chrome://tracing, ui.perfetto.dev).

One process per rank, with three kinds of tracks:

    measured     actions and waits, one within the other
    predicted    the actions of the step as the plan's cost model has them, from the same start
    transfers    one track per axis and operation; what lies beside an action is hidden behind it

Ranks hand their events over through the job's store; rank 0 writes them one rank after the other
and gives the file its name when it is whole.

Format: "Trace Event Format" (Google, 2016), JSON object form, times in microseconds.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store  # no public name when annotated

from costmodels.schedule import Interval
from costmodels.units import US
from runtime.tracing.events import Event

FILE = "trace.json"
_MEASURED, _PREDICTED = 1, 2  # tracks


def write_trace(
    folder: Path, ranks: Iterable[tuple[int, Sequence[Event], Sequence[Interval]]]
) -> Path:
    """Write a trace, rank by rank.

    Args:
        folder: Where the file goes.
        ranks: Number, events and predicted actions of each.

    Raises:
        ValueError: The file cannot be written; none is left behind.

    """
    path = folder / FILE
    part = path.with_suffix(".part")
    zero: float | None = None
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            separator = ""
            for rank, events, predicted in ranks:
                if zero is None:
                    zero = min((event.start for event in events), default=0.0)
                for record in _records(rank, events, predicted, zero):
                    file.write(separator + json.dumps(record, sort_keys=True))
                    separator = ",\n"
            file.write("\n]}\n")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def hand_over(store: Store, rank: int, events: Sequence[Event]) -> None:
    """Give a rank's events to rank 0."""
    store.set(_key(rank), json.dumps([asdict(event) for event in events]))


def handed_over(store: Store, num_ranks: int) -> Iterator[tuple[int, list[Event]]]:
    """Take every rank's events, one rank at a time."""
    for rank in range(num_ranks):
        events = json.loads(store.get(_key(rank)).decode())
        store.delete_key(_key(rank))
        yield rank, [Event(**event) for event in events]


def _key(rank: int) -> str:
    return f"trace/{rank}"


def _records(
    rank: int, events: Sequence[Event], predicted: Sequence[Interval], zero: float
) -> Iterator[dict[str, Any]]:
    yield _name(rank, "process_name", f"rank {rank}", 0)
    yield _name(rank, "thread_name", "measured", _MEASURED)
    yield _name(rank, "thread_name", "predicted", _PREDICTED)
    for number, event in enumerate(events):
        start, end = (event.start - zero) / US, (event.start + event.seconds - zero) / US
        if event.kind == "transfer":
            shared = {
                "name": f"{event.axis} {event.name}",
                "cat": event.axis,
                "pid": rank,
                "tid": _MEASURED,
                "id": f"{rank}.{number}",
            }
            yield {**shared, "ph": "b", "ts": start, "args": {"bytes": event.num_bytes}}
            yield {**shared, "ph": "e", "ts": end}
        else:
            yield _span(rank, _MEASURED, event.name, event.kind, (start, end - start))
    begin = min((event.start for event in events if event.kind == "step"), default=zero)
    for interval in predicted:
        start = (begin - zero + interval.start) / US
        length = (interval.end - interval.start) / US
        yield _span(rank, _PREDICTED, str(interval.action), "predicted", (start, length))


def _name(rank: int, what: str, name: str, track: int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": track, "args": {"name": name}}


def _span(rank: int, track: int, name: str, kind: str, span: tuple[float, float]) -> dict[str, Any]:
    start, length = span
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "pid": rank,
        "tid": track,
        "ts": start,
        "dur": length,
    }
