"""Run a function on several ranks of this machine, by forking: for tests and calibration.

A fork costs 0.1 s for eight ranks, where a launcher that starts Python and imports torch in each
takes 3 to 8 s. Training jobs use torchrun instead.

The caller must not have run multi-threaded torch work before: OpenMP's threads do not survive a
fork. `torch.set_num_threads(1)` early is enough.
"""

import faulthandler
import gc
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
from torch._C._distributed_c10d import TCPStore

from runtime.communication.mesh import World, join

GRACE = 2.0  # s between the first failure and the end of the others. Chosen: sockets close at once
LAST_WORDS = 0.2  # s for a hanging rank to print its stack. Chosen
CHUNK = 1 << 16

Result = Any  # what JSON can carry


class RankFailedError(RuntimeError):
    """A rank raised, died or did not answer in time; the message names it and says why."""


@dataclass(slots=True)
class _Child:
    rank: int
    pid: int
    pipe: int
    received: bytes = b""
    is_open: bool = True


def run_ranks(
    work: Callable[[World], Result],
    num_ranks: int,
    *,
    timeout: float = 60.0,
    device_type: str = "cpu",
) -> list[Result]:
    """Run a function on each rank of a fresh world and return what they return.

    Args:
        work: Called with the rank's world; returns something that JSON can carry.
        num_ranks: Processes to fork.
        timeout: Seconds after which all ranks are ended.
        device_type: "cpu" (gloo), or "cuda" (NCCL, a GPU per rank; the caller must not have
            touched the GPUs).

    Raises:
        RankFailedError: With the traceback of the first rank that failed.

    """
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    limit = timedelta(seconds=timeout)
    children = [
        _fork(partial(_join_and_work, work, rank, num_ranks, port, limit, device_type), rank)
        for rank in range(num_ranks)
    ]
    # The store's thread looks up names under a lock of the C library, and a rank forked meanwhile
    # would find it locked for ever: so the store comes last. Ranks that came before wait in line.
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    try:
        _collect(children, time.monotonic() + timeout)
    finally:
        statuses = _reap(children)
        del store  # ends its thread before the next fork
    answers = [_decode(child) for child in children]
    failed = [a for a in answers if a is not None and "error" in a]
    silent = [c.rank for c, a in zip(children, answers, strict=True) if a is None]
    if silent:  # these failed first: whoever raises still answers
        raise RankFailedError(_describe_silent(silent, statuses, timeout, failed))
    if failed:
        raise RankFailedError(_earliest(failed))
    return [answer["result"] for answer in answers if answer is not None]


def _fork(task: Callable[[], Result], rank: int) -> _Child:
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _run_child(task, rank, writing)
    os.close(writing)
    return _Child(rank, pid, reading)


def _join_and_work(  # noqa: PLR0917  (bound by position, in one place)
    work: Callable[[World], Result],
    rank: int,
    num_ranks: int,
    port: int,
    limit: timedelta,
    device_type: str,
) -> Result:
    torch.set_num_threads(1)
    # A collection would write into every object of the caller, and so copy all its memory.
    gc.freeze()
    # On fd 2 itself: a caller may have put something without a descriptor in stderr's place.
    faulthandler.register(signal.SIGUSR1, file=2)
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    with join(device=device, timeout=limit, store=store, rank=rank, world_size=num_ranks) as world:
        return work(world)


def _run_child(task: Callable[[], Result], rank: int, pipe: int) -> NoReturn:
    try:
        answer = {"result": task()}
    except BaseException:  # noqa: BLE001  (whatever it is, the parent must hear of it)
        answer = {"error": traceback.format_exc(), "rank": rank, "time": time.monotonic()}
    with os.fdopen(pipe, "wb") as stream:
        stream.write(json.dumps(answer).encode())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # no exit handlers of the parent's


def _collect(children: Sequence[_Child], deadline: float) -> None:
    """Read answers until all pipes close, the deadline passes, or failures end their grace."""
    while pending := [child for child in children if child.is_open]:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return
        ready, _, _ = select.select([child.pipe for child in pending], [], [], remaining)
        for child in pending:
            if child.pipe not in ready:
                continue
            chunk = os.read(child.pipe, CHUNK)
            child.received += chunk
            if not chunk:
                child.is_open = False
                os.close(child.pipe)
                if not child.received or b'"error"' in child.received[:16]:
                    deadline = min(deadline, time.monotonic() + GRACE)


def _reap(children: Sequence[_Child]) -> dict[int, int]:
    statuses = {}
    for child in children:
        if child.is_open:
            os.close(child.pipe)
            os.kill(child.pid, signal.SIGUSR1)  # it prints where it stands
            time.sleep(LAST_WORDS)
            os.kill(child.pid, signal.SIGKILL)
        statuses[child.rank] = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
    return statuses


def _decode(child: _Child) -> dict[str, Any] | None:
    if child.is_open or not child.received:
        return None
    answer: dict[str, Any] = json.loads(child.received)
    return answer


def _describe_silent(
    silent: Sequence[int], statuses: dict[int, int], timeout: float, failed: list[dict[str, Any]]
) -> str:
    codes = ", ".join(f"rank {rank} (exit status {statuses[rank]})" for rank in silent)
    others = f"; then {_earliest(failed)}" if failed else ""
    return f"no answer within {timeout:g} s from {codes}{others}"


def _earliest(failed: list[dict[str, Any]]) -> str:
    first = min(failed, key=lambda answer: float(answer["time"]))
    return f"rank {first['rank']} failed:\n{first['error']}"
