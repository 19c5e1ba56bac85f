"""Cores: ranks of a host share its cores out among them, where there are enough."""

import os

import pytest

from runtime.communication.cores import bind_to_cores, take_turns


@pytest.fixture(name="bound")
def _bound(monkeypatch):
    """Sets of cores that the process was bound to, on a host of eight cores that nobody bound."""
    calls = []
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda _, cores: calls.append(list(cores)), raising=False
    )
    return calls


def test_ranks_of_a_host_get_equal_shares_of_its_cores(bound):
    for rank in range(3):
        bind_to_cores(rank, 3)
    assert bound == [[0, 1], [2, 3], [4, 5]]


def test_twice_as_many_ranks_as_cores_share_each_between_two(bound):
    for rank in range(16):
        bind_to_cores(rank, 16)
    assert bound == [[core] for core in range(8)] * 2


@pytest.mark.parametrize("num_ranks", [1, 9])
def test_ranks_stay_free_when_alone_or_unevenly_more_than_cores(bound, num_ranks):
    bind_to_cores(0, num_ranks)
    assert bound == []


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="the system has no batch work")
@pytest.mark.parametrize(("num_ranks", "policies"), [(8, []), (9, ["batch"])])
def test_only_ranks_that_outnumber_the_cores_take_turns(bound, monkeypatch, num_ranks, policies):
    set_to = []
    names = {os.SCHED_BATCH: "batch"}
    monkeypatch.setattr(
        os, "sched_setscheduler", lambda _, policy, __: set_to.append(names[policy])
    )
    take_turns(num_ranks)
    assert set_to == policies


def test_a_process_that_somebody_bound_stays_as_it_is(bound, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    bind_to_cores(0, 2)
    assert bound == []
