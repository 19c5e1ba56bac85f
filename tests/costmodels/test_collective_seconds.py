"""Seconds of collectives: hand-worked figures, limits and laws."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.compiled import collectives
from costmodels.job import TrainingJob
from costmodels.profiles.reader import read_profile
from costmodels.time.collectives import collective_seconds
from costmodels.time.placement import Tiers
from costmodels.time.rates import rates_of
from costmodels.units import GB, GIB, US

NVLINK = {
    "inner_bandwidth": 450.0 * GB,
    "outer_bandwidth": 50.0 * GB,
    "inner_latency": 2 * US,
    "outer_latency": 5 * US,
    "base_latency": 0.0,
}
FREE = NVLINK | {"inner_latency": 0.0, "outer_latency": 0.0}

sizes = st.integers(1, 64)
payloads = st.floats(1.0, 1e11)


def test_all_gather_of_one_device_is_free():
    assert collectives.all_gather(payload=GIB, inner=1, outer=1, **NVLINK).seconds == 0


def test_all_gather_of_1_gib_on_8_nvlinked_gpus_takes_2_1_ms_by_hand():
    # 7 hops of 2 us, and 7/8 of 1.0737 GB at 450 GB/s: 2.0878 ms.
    seconds = collectives.all_gather(payload=GIB, inner=8, outer=1, **NVLINK).seconds
    assert seconds == pytest.approx(14e-6 + 2.08785e-3, rel=1e-4)


def test_all_reduce_of_large_tensors_is_reduce_scatter_and_all_gather():
    gather = collectives.all_gather(payload=GIB, inner=8, outer=4, **FREE).seconds
    reduce = collectives.all_reduce(payload=GIB, inner=8, outer=4, **FREE).seconds
    assert reduce == pytest.approx(2 * gather)


def test_ranks_of_a_node_pool_their_network_ports():
    # All but the own shard of 1.0737 GB passes each rank, over one port or spread over eight.
    alone = collectives.all_gather(payload=GIB, inner=1, outer=4, **FREE).seconds
    pooled = collectives.all_gather(payload=GIB, inner=8, outer=4, **FREE).seconds
    assert alone == pytest.approx(3 / 4 * GIB / (50 * GB))
    assert pooled == pytest.approx(31 / 32 * GIB / (400 * GB))


def test_all_reduce_over_three_nodes_takes_what_nccl_was_measured_at():
    # NVIDIA/nccl-tests#119: 133,169,160 bytes on 3 x 8 A100 whose nodes have four ports of 200 Gb/s
    # take 2.66 ms, of which a port carries 24 GB/s.
    ports = FREE | {"inner_bandwidth": 230.0 * GB, "outer_bandwidth": 4 / 8 * 24 * GB}
    seconds = collectives.all_reduce(payload=133_169_160, inner=8, outer=3, **ports).seconds
    assert seconds == pytest.approx(2.66e-3, rel=0.02)


def test_a_ring_passes_every_rank_of_every_node():
    # 16 nodes of 8: 127 hops, of which 15 over the network: 112 * 2 us + 15 * 5 us.
    seconds = collectives.all_gather(payload=0, inner=8, outer=16, **NVLINK).seconds
    assert seconds == pytest.approx(299e-6)


def test_small_all_reduce_over_many_nodes_uses_a_tree():
    # A ring over 64 nodes pays 2 * 63 hops, a double tree 2 * 6.
    seconds = collectives.all_reduce(payload=8, inner=1, outer=64, **NVLINK).seconds
    assert seconds == pytest.approx(2 * 6 * 5e-6, rel=1e-3)


def test_all_to_all_inside_a_node_moves_all_but_the_own_share():
    seconds = collectives.all_to_all(
        payload=GIB, inner=8, outer=1, across_share=1.0, **FREE
    ).seconds
    assert seconds == pytest.approx(7 / 8 * GIB / (450 * GB))


def test_all_to_all_over_nodes_is_bound_by_the_network():
    # 8 of 16 ranks are remote: half of the payload over the own port.
    seconds = collectives.all_to_all(
        payload=GIB, inner=8, outer=2, across_share=1.0, **FREE
    ).seconds
    assert seconds == pytest.approx(0.5 * GIB / (50 * GB))


def test_a_token_sent_once_per_node_saves_network_time():
    costs = [
        collectives.all_to_all(payload=GIB, inner=8, outer=2, across_share=share, **FREE).seconds
        for share in (1.0, 0.25)
    ]
    assert costs[1] == pytest.approx(costs[0] / 4)


def test_sending_to_a_neighbour_takes_the_tier_between_them():
    links = {k: v for k, v in NVLINK.items() if k != "inner"}
    near = collectives.send(payload=GIB, outer=1, **links).seconds
    far = collectives.send(payload=GIB, outer=2, **links).seconds
    assert near == pytest.approx(2e-6 + GIB / (450 * GB))
    assert far == pytest.approx(5e-6 + GIB / (50 * GB))


@given(payloads, sizes, sizes)
def test_seconds_grow_with_payload(payload, inner, outer):
    for name in ("all_gather", "all_reduce"):
        cost = getattr(collectives, name)
        small = cost(payload=payload, inner=inner, outer=outer, **NVLINK).seconds
        large = cost(payload=2 * payload, inner=inner, outer=outer, **NVLINK).seconds
        assert large >= small


@given(payloads, sizes, sizes)
def test_seconds_fall_with_bandwidth(payload, inner, outer):
    faster = NVLINK | {"inner_bandwidth": 900.0 * GB, "outer_bandwidth": 100.0 * GB}
    for name in ("all_gather", "all_reduce"):
        cost = getattr(collectives, name)
        before = cost(payload=payload, inner=inner, outer=outer, **NVLINK).seconds
        after = cost(payload=payload, inner=inner, outer=outer, **faster).seconds
        assert after <= before


@given(payloads, sizes)
def test_gathering_within_a_domain_is_not_slower_than_over_the_network(payload, size):
    within = collectives.all_gather(payload=payload, inner=size, outer=1, **NVLINK).seconds
    across = collectives.all_gather(payload=payload, inner=1, outer=size, **NVLINK).seconds
    assert within <= across


def test_all_to_alls_reach_a_share_of_what_rings_reach():
    job = TrainingJob(seq_len=2048, global_batch_size=8)
    rates = rates_of(job, read_profile("h100-sxm-80gb"))
    tiers = Tiers(inner=np.array([8]), outer=np.array([4]))

    def seconds(kind, share):
        return collective_seconds(kind, 1e13, tiers, replace(rates, all_to_all_share=share))[0]

    # So much that latency does not count.
    assert seconds("all_to_all", 0.5) == pytest.approx(2 * seconds("all_to_all", 1.0), rel=1e-4)
    assert seconds("all_gather", 0.5) == seconds("all_gather", 1.0)
