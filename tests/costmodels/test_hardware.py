"""Clusters: whole nodes, scale-up domains, what the driver leaves."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.hardware import (
    Calibration,
    Cluster,
    Device,
    HardwareProfile,
    Link,
    Provenance,
    make_cluster,
    usable_memory,
)
from costmodels.units import GB, GIB, TFLOP

PROFILE = HardwareProfile(
    name="eight",
    generation="hopper",
    device=Device(
        name="card",
        memory=80 * GIB,
        memory_bandwidth=3350.0 * GB,
        peak_flops=(("bf16", 989.4 * TFLOP), ("fp8", 1978.9 * TFLOP)),
        num_sms=132,
        host_bandwidth=63.0 * GB,
    ),
    gpus_per_node=8,
    host_memory=2048 * GIB,
    intra_node=Link(
        name="intra_node", kind="nvlink", num_devices=8, bandwidth=450.0 * GB, latency=1.9e-6
    ),
    inter_node=Link(
        name="inter_node", kind="infiniband", num_devices=0, bandwidth=50.0 * GB, latency=4e-6
    ),
    calibration=Calibration(constants=(("launch_seconds", 5e-6),)),
)


def test_peak_is_none_where_the_part_lacks_a_precision():
    assert PROFILE.device.peak("bf16") == 989.4e12
    assert PROFILE.device.peak("nvfp4") is None


def test_the_driver_keeps_one_percent_unless_the_device_says_otherwise():
    assert usable_memory(PROFILE) == pytest.approx(79.2 * GIB)
    card = replace(PROFILE, device=replace(PROFILE.device, usable_fraction=0.925))
    assert make_cluster(card, 8).usable_memory == pytest.approx(74.0 * GIB)


def test_one_node_may_be_partly_filled():
    cluster = make_cluster(PROFILE, 3)
    assert (cluster.num_gpus, cluster.gpus_per_node, cluster.num_nodes) == (3, 8, 1)


def test_above_one_node_a_cluster_is_whole_nodes_and_the_message_gives_the_nearest():
    with pytest.raises(ValueError, match=r"gpus = 12 .* gpus_per_node = 8 \(profile eight\)") as e:
        make_cluster(PROFILE, 12)
    assert "8 or 16" in str(e.value)
    with pytest.raises(ValueError, match=r"gpus_per_node = 6 \(--gpus-per-node\).* 6 or 12"):
        make_cluster(PROFILE, 8, 6)


@pytest.mark.parametrize(("gpus", "per_node"), [(0, None), (-8, None), (8, 0), (8, -1)])
def test_counts_below_one_are_refused(gpus, per_node):
    with pytest.raises(ValueError, match="must be at least 1"):
        make_cluster(PROFILE, gpus, per_node)


@given(st.integers(1, 4096), st.integers(1, 72))
def test_a_cluster_exists_exactly_where_nodes_are_whole_or_single(gpus, per_node):
    legal = gpus <= per_node or gpus % per_node == 0
    try:
        cluster = make_cluster(PROFILE, gpus, per_node)
    except ValueError as error:
        assert not legal
        nearest = [int(word) for word in str(error).split("nearest legal: ")[1].split(" or ")]
        assert all(n % per_node == 0 for n in nearest)
        assert nearest[0] < gpus < nearest[1]
    else:
        assert legal
        assert (cluster.num_nodes - 1) * per_node < gpus <= cluster.num_nodes * per_node


def test_scale_up_domain_is_the_node_unless_the_fabric_spans_hosts():
    assert make_cluster(PROFILE, 64).scale_up_size == 8
    assert make_cluster(PROFILE, 64, 4).scale_up_size == 4
    rack = replace(PROFILE, gpus_per_node=4, intra_node=replace(PROFILE.intra_node, num_devices=72))
    assert make_cluster(rack, 144).scale_up_size == 72
    assert make_cluster(rack, 144, 2).scale_up_size == 72
    assert make_cluster(rack, 144, 8).scale_up_size == 8


def test_constants_are_read_by_name_and_a_missing_one_is_named():
    assert PROFILE.calibration["launch_seconds"] == 5e-6
    with pytest.raises(KeyError, match="tile_rows"):
        PROFILE.calibration["tile_rows"]


@pytest.mark.parametrize(
    "change",
    [
        {"memory": 0},
        {"memory_bandwidth": float("nan")},
        {"usable_fraction": 1.01},
        {"peak_flops": ()},
        {"peak_flops": (("bf16", -1.0),)},
        {"num_sms": -3},
    ],
)
def test_devices_that_cannot_be_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(PROFILE.device, **change)


def test_links_nodes_and_clusters_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="bandwidth"):
        replace(PROFILE.inter_node, bandwidth=0.0)
    with pytest.raises(ValueError, match="latency"):
        replace(PROFILE.inter_node, latency=-1e-6)
    with pytest.raises(ValueError, match="host_memory"):
        replace(PROFILE, host_memory=0)
    with pytest.raises(ValueError, match="num_gpus"):
        Cluster(profile=PROFILE, num_gpus=0, gpus_per_node=8)


def test_sources_do_not_change_what_a_profile_hashes_to():
    sourced = replace(
        PROFILE, provenance=(Provenance(key="device.memory_gib", kind="measured", source="here"),)
    )
    assert hash(sourced) == hash(PROFILE)
    assert sourced != PROFILE


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gemm_efficiency", 0.0),
        ("full_power_watts", -1.0),
        ("kernel_gap", -1e-6),
        ("tail_share", 1e308),
        ("step_overhead", float("nan")),
    ],
)
def test_constants_that_no_machine_has_are_refused(name, value):
    with pytest.raises(ValueError, match=f"the constant {name} must be"):
        Calibration(constants=((name, value),))
    assert Calibration(constants=(("tail_share", 0.0),))["tail_share"] == 0.0


@pytest.mark.parametrize("watts", [0.0, -700.0, float("inf")])
def test_a_power_limit_is_positive(watts):
    with pytest.raises(ValueError, match="power_watts"):
        replace(PROFILE.device, power_watts=watts)
