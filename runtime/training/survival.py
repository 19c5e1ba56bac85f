"""Who died: every rank beats a counter in the job's store, so that survivors can name the silent.

A rank that dies shows on the others as a closed connection or a collective that never ends; neither
says who it was. Here each rank has a thread that counts up once per period. On an error the others
watch the counters for a while: whose does not move is gone. The thread also watches the next rank
in line and ends the process if that one falls silent, so that no backend can hang the job.
"""

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

PERIOD = 0.5  # s between beats. Chosen: far below any timeout, far above a store's latency
LOOK = 4 * PERIOD  # s to watch before a rank counts as silent; a busy machine delays threads
LOST_STATUS = 1
LEFT = b"left"  # in place of a count: this rank has ended of itself and said why


class TrainingBrokeError(RuntimeError):
    """The run cannot go on, for a reason that all ranks share; the message says which."""


class StoppedError(RuntimeError):
    """SIGTERM came; the step that ran is done and saved."""


class Store(Protocol):
    """What is needed of torch's store."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""

    def get(self, key: str) -> bytes:
        """Return a key's value, waiting for the first."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are set."""


class Heartbeat:
    """Beats for one rank and looks for the others."""

    def __init__(self, store: Store, rank: int, num_ranks: int, *, patience: float) -> None:
        """Prepare; `start` begins to beat.

        Args:
            store: A connection of its own: the thread uses it while the rank uses others.
            rank: This rank.
            num_ranks: Ranks of the job.
            patience: Seconds of silence of the next rank that end this process.

        """
        self._store = store
        self._rank = rank
        self._num_ranks = num_ranks
        self._patience = patience
        self._stopped = threading.Event()
        self._lock = threading.Lock()  # one connection, two threads

    @contextmanager
    def beating(self) -> Iterator["Heartbeat"]:
        """Beat while the block runs."""
        thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        thread.start()
        yield self
        self._stopped.set()
        thread.join()
        with suppress(Exception), self._lock:  # the store may be gone with its host
            self._store.set(_key(self._rank), LEFT.decode())

    def silent_ranks(self) -> tuple[int, ...]:
        """Return the ranks whose counters do not move while one looks; takes seconds."""
        others = [rank for rank in range(self._num_ranks) if rank != self._rank]
        try:
            before = self._counts(others)
            time.sleep(LOOK)
            after = self._counts(others)
        except Exception:  # noqa: BLE001  (torch raises its own kinds when the store is gone)
            return ()
        return tuple(rank for rank in others if before[rank] == after[rank] and after[rank] != LEFT)

    def _counts(self, ranks: Iterable[int]) -> dict[int, bytes]:
        with self._lock:
            keys = {rank: _key(rank) for rank in ranks}
            return {
                rank: self._store.get(key) if self._store.check([key]) else b""
                for rank, key in keys.items()
            }

    def _run(self) -> None:
        following = (self._rank + 1) % self._num_ranks
        last, since, beats = b"", time.monotonic(), 0
        while not self._stopped.wait(PERIOD):
            beats += 1
            try:
                with self._lock:
                    self._store.set(_key(self._rank), str(beats))
                count = self._counts([following])[following]
            except Exception:  # noqa: BLE001  (the store's host has ended: the error shows there)
                return
            if count != last or count == LEFT:
                last, since = count, time.monotonic()
            elif following != self._rank and time.monotonic() - since > self._patience:
                print(  # noqa: T201  (the last words of this process)
                    f"rank {following} has been silent for {self._patience:g} s; rank "
                    f"{self._rank} ends",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(LOST_STATUS)


def failure_message(rank: int, step: int, silent: tuple[int, ...], error: BaseException) -> str:
    """Say what ended a run, as seen by one rank."""
    first_line = str(error).strip().partition("\n")[0]
    if silent:
        names = ", ".join(map(str, silent))
        word = "ranks" if len(silent) > 1 else "rank"
        return f"{word} {names} died in step {step}; rank {rank} ends ({first_line})"
    return (
        f"communication failed in step {step} on rank {rank} although every rank still answers: "
        f"{first_line}"
    )


def _key(rank: int) -> str:
    return f"heartbeat/{rank}"
