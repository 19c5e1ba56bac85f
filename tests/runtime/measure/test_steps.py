"""Steps of a tiny model give the gap between kernels, and what a step costs once."""

import pytest
import torch

from costmodels.profile_toml import own_constants, profile_entries
from planner.presets import read_model
from runtime.launch import run_ranks
from runtime.measure import steps
from runtime.measure.samples import sample

GAP = own_constants("cpu")["kernel_gap"]
ENTRIES = {**profile_entries("cpu-gloo"), "constants.kernel_gap": GAP}


def step_seconds(num_micro_batches, **constants):
    model = read_model(steps.MODEL)
    layout = steps._layout(model, 2, num_micro_batches)
    return steps._predicted(steps._with(ENTRIES, **constants), model, layout)


def samples_of(**constants):
    return [
        sample("step", "fp32", step_seconds(m, **constants), num_micro_batches=m)
        for m in steps.MICRO_BATCHES
    ]


def found(samples):
    constants = steps.fit_steps(samples, ENTRIES, read_model(steps.MODEL), 2)
    return {f.key.removeprefix("constants."): f.value for f in constants}


def test_steps_made_with_two_constants_give_them_back():
    constants = found(samples_of(kernel_gap=8e-6, step_overhead=4e-3))
    assert constants["kernel_gap"] == pytest.approx(8e-6, rel=1e-2)
    assert constants["step_overhead"] == pytest.approx(4e-3, rel=1e-2)


def test_a_gap_is_no_shorter_than_that_of_a_kernel_in_a_loop():
    constants = found(samples_of(kernel_gap=0.0, step_overhead=0.0))
    assert constants["kernel_gap"] == float(GAP.value)
    assert constants["step_overhead"] == pytest.approx(0.0, abs=1e-6)


def test_nothing_is_found_without_steps():
    assert found([]) == {}


def test_real_steps_are_measured_with_one_graph_for_all():
    tiny = steps.tiny_job(1)

    class OneCallWatch:
        device = torch.device("cpu")

        def seconds(self, call):
            call()
            return 1e-3

    def work(world):
        taken = steps.step_samples(OneCallWatch(), world, tiny)
        return [s["num_micro_batches"] for s in taken]

    assert run_ranks(work, 1) == [list(steps.MICRO_BATCHES)]
