"""Programs: what small decoders sustain gives the constants that single kernels cannot tell."""

from dataclasses import replace

import pytest
import torch

from costmodels.profiles.reader import read_profile
from runtime.launch import run_ranks
from runtime.measure import steps
from runtime.measure.program_fit import (
    _micro_batch_seconds,
    _step_seconds,
    _with,
    fit_programs,
)
from runtime.measure.samples import sample

ALONE = read_profile("cpu-gloo")
IN_PROGRAMS = {"gemm_efficiency": 0.7, "memory_efficiency": 0.6, "kernel_gap": 9e-6}


def micro_batches():
    return [
        sample("micro_batch", "fp32", 1.0, decoder=d, micro_batch_size=size, seq_len=length)
        for d, decoder in enumerate(steps.DECODERS)
        for size, length in decoder.shapes
    ]


def whole_steps():
    return [
        sample("step", "fp32", 1.0, decoder=0, micro_batch_size=1, seq_len=16, num_micro_batches=m)
        for m in steps.STEPS
    ]


def taken(**constants):
    """Samples that take what the cost model says with some constants."""
    profile = _with(ALONE, {**IN_PROGRAMS, **constants})
    return [
        *(replace(s, seconds=_micro_batch_seconds(profile, s, 2)) for s in micro_batches()),
        *(replace(s, seconds=_step_seconds(profile, s, 2)) for s in whole_steps()),
    ]


def test_programs_made_with_constants_give_them_back():
    constants = {f.key: f.value for f in fit_programs(taken(step_overhead=4e-3), ALONE, 2)}
    assert constants == {
        **{f"constants.{name}": pytest.approx(v, rel=0.02) for name, v in IN_PROGRAMS.items()},
        "constants.step_overhead": pytest.approx(4e-3, rel=0.05),
    }


def test_nothing_is_found_without_programs():
    assert fit_programs([sample("empty", "fp32", 1e-6)], ALONE, 1) == []


def test_micro_batches_and_steps_run_on_every_rank():
    graphs = steps.traced_decoders(1)

    class OneCallWatch:
        device = torch.device("cpu")

        def seconds(self, call):
            call()
            return 1.0

    def work(world):
        samples = steps.program_samples(OneCallWatch(), world, graphs)
        return [[s.formula, dict(s.arguments)] for s in samples]

    expected = [[s.formula, dict(s.arguments)] for s in (*micro_batches(), *whole_steps())]
    assert run_ranks(work, 1) == [expected]
