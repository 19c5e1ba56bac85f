"""One thread: tests fork ranks, and OpenMP's threads do not survive a fork."""

import json

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def equal_one_process(record_property):
    """Return what holds layouts to one process and leaves them in the report for the table."""
    from parity_cases import check  # noqa: PLC0415  (few tests need the planner's space)
    from parity_space import facts  # noqa: PLC0415

    def hold(name, num_ranks, cases, timeout=600):
        assert cases
        errors = check(name, num_ranks, cases, timeout)
        rows = [
            {"model": name, **facts(layout), "errors": kinds}
            for layout, kinds in zip(cases, errors, strict=True)
        ]
        record_property("layouts", json.dumps(rows))

    return hold
