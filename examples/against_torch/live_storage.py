"""The most storage that lives at once while a program runs, as torch's own profiler saw it.

The profiler tells of every block that the allocator gives or takes back, but not of one that a
thread of gloo takes back when it is the last to let go of a tensor. Such a block is found out when
another one is placed over it; until then it counts as alive.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

MARK = "what counts"


def peak_of(prepare: Callable[[], Callable[[], object]]) -> int:
    """Return the peak, in bytes, of a call.

    Args:
        prepare: Makes what the call needs, which counts as far as it stays, and returns the call.

    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        call = prepare()
        with record_function(MARK):
            call()
    results = watched.profiler.kineto_results
    (begin,) = (event.start_ns() for event in results.events() if event.name() == MARK)
    blocks = sorted(
        (event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size)
        for event in _flat(results.experimental_event_tree())
        if event.tag.name == "Allocation"
    )
    return max(live for moment, live in live_bytes(blocks) if moment >= begin)


def live_bytes(blocks: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
    """Yield what is alive after each change.

    Args:
        blocks: (moment, address, bytes) in order of time; bytes are negative where a block goes.

    Yields:
        (moment, bytes).

    """
    starts: list[int] = []  # ascending, of the blocks that are alive
    sizes: dict[int, int] = {}
    live = 0

    def drop(start: int) -> None:
        nonlocal live
        starts.pop(bisect_left(starts, start))
        live -= sizes.pop(start)

    for moment, address, size in blocks:
        if size < 0:
            if address in sizes:
                drop(address)
        else:
            before = bisect_left(starts, address)
            if before and starts[before - 1] + sizes[starts[before - 1]] > address:
                drop(starts[before - 1])
            first = bisect_left(starts, address)
            for start in starts[first : bisect_left(starts, address + size)]:
                drop(start)
            insort(starts, address)
            sizes[address] = size
            live += size
        yield moment, live


def _flat(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _flat(event.children)
