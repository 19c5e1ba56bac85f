"""Cores: ranks of a host share its cores out among them, where there are enough."""

import os

import pytest

from runtime.cores import bind_to_cores


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


@pytest.mark.parametrize("num_ranks", [1, 9])
def test_ranks_stay_free_when_alone_or_more_than_cores(bound, num_ranks):
    bind_to_cores(0, num_ranks)
    assert bound == []


def test_a_process_that_somebody_bound_stays_as_it_is(bound, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    bind_to_cores(0, 2)
    assert bound == []
