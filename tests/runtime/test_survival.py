"""Heartbeats: who is silent, who left with a word, and what the survivors say."""

import time

import pytest

from runtime.training import survival
from runtime.training.survival import Heartbeat, failure_message


class Shelf:
    """A store within one process."""

    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value.encode()

    def get(self, key):
        return self.values[key]

    def check(self, keys):
        return all(key in self.values for key in keys)


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(survival, "PERIOD", 0.02)
    monkeypatch.setattr(survival, "LOOK", 0.3)


def heart(shelf, rank, num_ranks=3):
    return Heartbeat(shelf, rank, num_ranks, patience=60)


def test_ranks_that_beat_are_not_silent():
    shelf = Shelf()
    with heart(shelf, 1).beating(), heart(shelf, 2).beating():
        assert heart(shelf, 0).silent_ranks() == ()


def test_a_rank_that_stopped_beating_is_silent():
    shelf = Shelf()
    shelf.set("heartbeat/2", "17")
    with heart(shelf, 1).beating():
        assert heart(shelf, 0).silent_ranks() == (2,)


def test_a_rank_that_never_came_is_silent():
    shelf = Shelf()
    with heart(shelf, 1).beating():
        assert heart(shelf, 0).silent_ranks() == (2,)


def test_a_rank_that_ended_with_a_word_is_not_called_dead():
    shelf = Shelf()
    with heart(shelf, 1).beating():
        time.sleep(0.1)
    assert shelf.get("heartbeat/1") == survival.LEFT
    with heart(shelf, 2).beating():
        assert heart(shelf, 0).silent_ranks() == ()


def test_without_a_store_nobody_is_accused():
    class Gone(Shelf):  # its host has ended
        def check(self, keys):  # noqa: ARG002  (the store's signature)
            raise RuntimeError("connection refused")

    assert heart(Gone(), 0).silent_ranks() == ()


def test_messages_name_ranks_and_the_step_on_one_line():
    error = RuntimeError("Connection closed by peer\nmore lines")
    assert failure_message(0, 12, (3,), error) == (
        "rank 3 died in step 12; rank 0 ends (Connection closed by peer)"
    )
    assert failure_message(0, 12, (3, 4), error).startswith("ranks 3, 4 died in step 12")
    alive = failure_message(5, 1, (), error)
    assert "failed in step 1 on rank 5 although every rank still answers" in alive
    assert "\n" not in alive
