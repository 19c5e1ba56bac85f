"""Questions that do not wait for each other, asked of several processes at once."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import starmap
from typing import TypeVar, TypeVarTuple

Arguments = TypeVarTuple("Arguments")
Answer = TypeVar("Answer")


def mapped(
    answer: Callable[[*Arguments], Answer],
    questions: Iterable[tuple[*Arguments]],
    workers: int,
) -> Iterator[Answer]:
    """Yield the answers in the order of the questions; the same for any number of workers.

    Args:
        answer: A function of a module.
        questions: Its arguments; with several workers all are asked at once.
        workers: Processes; with one, each is asked in this process when its answer is wanted.

    """
    if workers == 1:
        yield from starmap(answer, questions)
        return
    pool = ProcessPoolExecutor(workers)
    try:
        yield from pool.map(answer, *zip(*questions, strict=True))
    finally:
        pool.shutdown(cancel_futures=True)
