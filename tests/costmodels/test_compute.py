"""Seconds of products, attention and passes: hand-worked figures and laws."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.compiled import compute
from costmodels.units import GB, TFLOP

DEVICE = {
    "peak": 1000.0 * TFLOP,
    "gemm_efficiency": 1.0,
    "k_fill": 0,
    "num_sms": 128,
    "tail_share": 1.0,
    "memory_bandwidth": 3000.0 * GB,
    "memory_efficiency": 1.0,
    "kernel_gap": 0.0,
    "element_bytes": 2,
}
dims = st.integers(1, 20000)


def seconds(m, n, k, count=1, **changes):
    return compute.gemm(m=m, n=n, k=k, count=count, **(DEVICE | changes)).seconds


def test_a_product_of_whole_waves_runs_at_the_peak():
    # 4096 x 4096 makes 16 * 32 tiles of 256 x 128: four full waves of 128.
    assert seconds(4096, 4096, 4096) == pytest.approx(2 * 4096**3 / 1e15)


def test_one_tile_more_than_a_wave_costs_a_wave_of_smaller_tiles():
    full, over = seconds(4096, 4096, 4096), seconds(4096 + 1, 4096, 4096)
    assert 1.01 * full < over < 1.3 * full


def test_a_part_of_the_last_wave_is_lost():
    # 4096 x 4224 makes 16 * 33 tiles of 256 x 128 on 128 multiprocessors: 4.125 waves, of which
    # four are full. Of the idle 0.875 nothing costs time, or a quarter.
    wave = seconds(4096, 4096, 4096) / 4
    for share, waves in ((0.0, 4.125), (0.25, 4.34375)):
        assert seconds(4096, 4224, 4096, tail_share=share) == pytest.approx(waves * wave)


def test_less_than_a_wave_takes_a_whole_one():
    # One tile of 64 x 64, at 0.6 of the rate, whatever the other multiprocessors do.
    alone = seconds(64, 64, 4096, tail_share=0.0)
    assert alone == pytest.approx(2 * 64 * 64 * 4096 * 128 / 0.6e15)


def test_a_product_of_few_rows_is_bound_by_reading_its_weight():
    moved = 2 * (1 * 8192 + 8192 * 8192 + 1 * 8192)
    assert seconds(1, 8192, 8192) == pytest.approx(moved / 3e12, rel=1e-3)


def test_short_inner_dimensions_lose_to_filling_the_tile():
    slow = seconds(8192, 8192, 256, k_fill=256, memory_bandwidth=1e18)
    assert slow == pytest.approx(2 * seconds(8192, 8192, 256, memory_bandwidth=1e18))


def test_products_of_one_launch_share_waves():
    # Together 16 products make 128 tiles of 256 x 128, one wave; alone each makes 64 tiles of
    # 64 x 64, half a wave, at 0.6 of the rate.
    together = seconds(512, 512, 4096, count=16)
    alone = seconds(512, 512, 4096)
    assert alone == pytest.approx(2 * 64 * 64 * 4096 * 128 / 0.6e15)
    assert together < 16 * alone / 2


@given(dims, dims, dims)
def test_no_product_is_faster_than_the_peak_or_than_memory(m, n, k):
    least = max(2 * m * n * k / 1e15, 2 * (m * k + k * n + m * n) / 3e12)
    assert seconds(m, n, k) >= least * (1 - 1e-9)


@given(dims, dims, dims, dims)
def test_more_of_the_inner_dimension_never_takes_less(m, n, k, more):
    assert seconds(m, n, k + more) >= seconds(m, n, k)


def test_attention_on_long_sequences_with_wide_heads_runs_at_its_efficiency():
    result = compute.attention(
        attention_flops=1e15,
        attention_efficiency=0.5,
        length=1e9,
        length_fill=500,
        head_width=128,
        peak=1e15,
        kernels=0,
        kernel_gap=0.0,
    ).seconds
    assert result == pytest.approx(2.0)


def test_attention_at_the_fill_length_runs_at_half_its_rate():
    common = {
        "attention_flops": 1e12,
        "attention_efficiency": 0.5,
        "length_fill": 500,
        "head_width": 128,
        "peak": 1e15,
        "kernels": 0,
        "kernel_gap": 0.0,
    }
    short = compute.attention(length=500, **common).seconds
    endless = compute.attention(length=1e12, **common).seconds
    assert short == pytest.approx(2 * endless)


def test_a_pass_moves_its_bytes_and_pays_for_its_kernels():
    result = compute.memory_pass(
        moved=6e9, kernels=2, kernel_gap=1e-6, memory_bandwidth=3e12, memory_efficiency=0.8
    ).seconds
    assert result == pytest.approx(6e9 / 2.4e12 + 2e-6)


def test_hidden_communication_costs_only_what_it_slows_down():
    exposed = compute.overlap(communication=1.0, hidden_by=4.0, slowdown=0.1).exposed
    assert exposed == pytest.approx(0.1)


def test_communication_longer_than_what_hides_it_shows_the_rest():
    exposed = compute.overlap(communication=5.0, hidden_by=4.0, slowdown=0.1).exposed
    assert exposed == pytest.approx(1.0 + 0.4)


@given(st.floats(0, 100), st.floats(0, 100))
def test_exposed_time_lies_between_nothing_and_all(communication, hidden_by):
    exposed = compute.overlap(
        communication=communication, hidden_by=hidden_by, slowdown=0.2
    ).exposed
    assert 0 <= exposed <= communication + 1e-12
