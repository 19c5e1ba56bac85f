"""The fork launcher: results come back, failures name their rank, nobody hangs."""

import os
import signal
import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from costmodels.layout import Layout
from runtime.communication import collectives
from runtime.communication.mesh import join
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


def test_a_launcher_that_says_no_local_rank_can_join():
    """MPI and Slurm wrappers set the global numbers only."""

    def work(_):
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
        dist.destroy_process_group()
        with join(device=torch.device("cpu"), timeout=timedelta(seconds=20)) as world:
            size = world.size
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return size

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert run_ranks(work, 1) == [1]
