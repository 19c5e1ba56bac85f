"""The stopwatch: the same number of calls on every rank, the slowest rank counts."""

import time

import torch

from costmodels.layout import Layout
from runtime.launch import run_ranks
from runtime.measure.stopwatch import Stopwatch


def test_every_rank_makes_the_same_calls_and_hears_of_the_slowest():
    def work(world):
        watch = Stopwatch(
            world=world.mesh(Layout(data_parallel=2, layers_per_stage=(1,))).group("world"),
            device=world.device,
            repeat_seconds=0.01,
        )
        calls = []

        def call():
            calls.append(None)
            time.sleep(0.002 if world.rank == 1 else 0.0)

        return [watch.seconds(call), len(calls)]

    (first, first_calls), (second, second_calls) = run_ranks(work, 2)
    assert first == second
    assert first >= 0.002
    assert first_calls == second_calls >= 3  # to warm up, a trial, its repeat


def test_agree_returns_the_largest_value():
    def work(world):
        group = world.mesh(Layout(data_parallel=2, layers_per_stage=(1,))).group("world")
        return Stopwatch(world=group, device=torch.device("cpu")).agree(float(world.rank + 3))

    assert run_ranks(work, 2) == [4.0, 4.0]
