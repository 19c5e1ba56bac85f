"""Questions that do not wait for each other, asked of several processes at once."""

from collections.abc import Callable, Iterable, Iterator
from itertools import starmap
from signal import SIG_IGN, SIGINT, signal
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
        workers: Processes at most; with one, this process answers, each when it is wanted.

    """
    asked = list(questions)
    if min(workers, len(asked)) <= 1:
        yield from starmap(answer, asked)
        return
    from concurrent.futures import ProcessPoolExecutor  # noqa: PLC0415 - others start faster

    # An interrupt is this process's to tell of; the others end with it.
    pool = ProcessPoolExecutor(
        min(workers, len(asked)), initializer=signal, initargs=(SIGINT, SIG_IGN)
    )
    try:
        yield from pool.map(answer, *zip(*asked, strict=True))
    finally:
        pool.shutdown(cancel_futures=True)
