"""Questions that do not wait for each other, asked of several processes at once."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

Question = TypeVar("Question")
Answer = TypeVar("Answer")


def mapped(
    answer: Callable[[Question], Answer], questions: Iterable[Question], workers: int
) -> Iterator[Answer]:
    """Yield the answers in the order of the questions; the same for any number of workers.

    Args:
        answer: A function of a module.
        questions: What it is asked; with several workers all are asked at once.
        workers: Processes; with one, each is asked in this process when its answer is wanted.

    """
    if workers == 1:
        yield from map(answer, questions)
        return
    pool = ProcessPoolExecutor(workers)
    try:
        yield from pool.map(answer, questions)
    finally:
        pool.shutdown(cancel_futures=True)
