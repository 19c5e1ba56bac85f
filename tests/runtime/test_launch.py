"""The fork launcher: results come back, failures name their rank, nobody hangs."""

import os
import signal
import time

import pytest
import torch

from costmodels.layout import Layout
from runtime import collectives
from runtime.launch import RankFailedError, run_ranks


def test_results_come_back_in_rank_order():
    assert run_ranks(lambda world: {"rank": world.rank, "of": world.size}, 3) == [
        {"rank": rank, "of": 3} for rank in range(3)
    ]


def test_a_rank_that_raises_is_named_with_its_traceback():
    def work(world):
        if world.rank == 1:
            raise ValueError("no such layer")

    with pytest.raises(RankFailedError, match=r"rank 1 failed:(.|\n)*no such layer"):
        run_ranks(work, 2)


def test_a_killed_rank_ends_the_job_at_once_and_is_named():
    def work(world):
        group = world.mesh(Layout(data_parallel=3, layers_per_stage=(1,))).group("dp")
        if world.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(3):
            collectives.all_reduce(torch.ones(4), group)

    start = time.monotonic()
    with pytest.raises(RankFailedError, match=r"no answer .* rank 2 \(exit status -9\)"):
        run_ranks(work, 3, timeout=60)
    assert time.monotonic() - start < 30


def test_a_rank_that_hangs_is_ended_at_the_timeout():
    def work(world):
        if world.rank == 0:
            time.sleep(60)

    with pytest.raises(RankFailedError, match=r"no answer within 1\.5 s from rank 0"):
        run_ranks(work, 2, timeout=1.5)
