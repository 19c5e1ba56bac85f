"""Offloaded activations cost what the link to the host does not hide behind compute."""

from dataclasses import replace

import pytest

from costmodels.hardware import make_cluster
from costmodels.job import Target, TrainingJob
from costmodels.layout import Layout, Offload, Recompute
from costmodels.profiles.reader import read_profile
from costmodels.time.estimate import estimate_time
from planner.presets import read_model

PROFILE = read_profile("h100-sxm-80gb")
LAYERS, MICRO_BATCHES, TOKENS, HIDDEN = 32, 4, 8192, 4096
KEPT = Layout(
    data_parallel=8,
    zero_stage=1,
    zero_group=8,
    num_micro_batches=MICRO_BATCHES,
    layers_per_stage=(LAYERS,),
    offload=(Offload.ACTIVATIONS,),
)


def step(layout, host_bandwidth=PROFILE.device.host_bandwidth):
    device = replace(PROFILE.device, host_bandwidth=host_bandwidth)
    cluster = make_cluster(replace(PROFILE, device=device), 8, 8)
    job = TrainingJob(
        seq_len=TOKENS, global_batch_size=layout.global_batch_size, target=Target.MEGATRON
    )
    time = estimate_time(read_model("8b"), job, cluster, layout)
    return time, next((term for term in time.terms if term.name == "offload"), None)


def test_inputs_of_recomputed_layers_travel_behind_compute():
    redone = replace(KEPT, recompute=Recompute.FULL)
    time, offload = step(redone)
    moved = 2 * LAYERS * MICRO_BATCHES * 2 * TOKENS * HIDDEN  # there and back, 2 bytes a value
    assert offload.seconds == pytest.approx(moved / PROFILE.device.host_bandwidth)
    assert offload.exposed_seconds == 0
    on_device, nothing = step(replace(redone, offload=()))
    assert nothing is None
    assert time.step_seconds == on_device.step_seconds


def test_what_outlasts_compute_is_exposed_and_in_the_step():
    time, offload = step(KEPT)
    on_device, _ = step(replace(KEPT, offload=()))
    assert 0 < offload.exposed_seconds < offload.seconds
    assert time.step_seconds - on_device.step_seconds == pytest.approx(
        offload.exposed_seconds, rel=1e-3
    )
    assert sum(term.exposed_seconds for term in time.terms) == pytest.approx(time.step_seconds)


def test_half_the_link_takes_twice_as_long():
    _, fast = step(KEPT, 60e9)
    _, slow = step(KEPT, 30e9)
    assert slow.seconds == pytest.approx(2 * fast.seconds)
    # Compute hides the same of both, once in forward and once in backward.
    assert slow.exposed_seconds - fast.exposed_seconds == pytest.approx(fast.seconds, rel=1e-6)
