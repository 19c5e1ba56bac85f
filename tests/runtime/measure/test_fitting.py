"""Samples made by the cost model's own formulas give the constants back."""

import numpy as np
import pytest

from costmodels.compiled import collectives, compute
from runtime.measure.fitting import (
    fit_attention,
    fit_links,
    fit_overlap,
    fit_passes,
    fit_products,
)
from runtime.measure.samples import sample

PRODUCTS = [(64, 256, 256), (256, 512, 512), (512, 384, 1536), (1024, 1024, 1024), (512, 4096, 64)]
GAP = 2e-6
BANDWIDTH = 12e9


def gemm_sample(precision, peak, shape, *, efficiency=0.8, k_fill=100, slowed=1.0):
    arguments = {
        **dict(zip(("m", "n", "k"), shape, strict=True)),
        "count": 1,
        "element_bytes": 4 if precision == "fp32" else 2,
    }
    seconds = compute.gemm(
        **arguments,
        peak=peak,
        gemm_efficiency=efficiency,
        k_fill=k_fill,
        num_sms=1,
        tail_share=1.0,
        memory_bandwidth=BANDWIDTH,
        memory_efficiency=1.0,
        kernel_gap=GAP,
    ).seconds
    return sample("gemm", precision, slowed * float(seconds), **arguments)


def link_sample(formula, size, ranks, constants):
    bandwidth, hop, start = constants
    arguments = {"payload": size, "outer": 1, **({} if formula == "send" else {"inner": ranks})}
    extra = {"across_share": 1.0} if formula == "all_to_all" else {}
    seconds = getattr(collectives, formula)(
        **arguments,
        **extra,
        base_latency=start,
        inner_bandwidth=bandwidth,
        inner_latency=hop,
        outer_bandwidth=1e30,
        outer_latency=0.0,
    ).seconds
    return sample(formula, "fp32", float(seconds), **arguments)


def by_key(found):
    return {f.key: f.value for f in found}


def test_passes_give_bandwidth_share_and_gap_back():
    moved = np.array([2e5, 1e6, 1e7, 1e8])
    seconds = moved / 8e9 + 3e-6
    samples = [sample("empty", "fp32", 3e-6)] + [
        sample("memory_pass", "fp32", float(t), moved=float(b), kernels=1)
        for b, t in zip(moved, seconds, strict=True)
    ]
    told = by_key(fit_passes(samples, host_is_device=True))
    best = (moved / seconds).max()
    assert told["device.memory_gb_per_s"] == pytest.approx(best)
    # The best pass pays its gap too, so no share of it above 1 is needed: they agree to that.
    sustained = told["device.memory_gb_per_s"] * told["constants.memory_efficiency"]
    assert sustained == pytest.approx(8e9, rel=0.02)
    assert told["constants.kernel_gap"] == pytest.approx(3e-6)
    assert told["constants.host_launch"] == 3e-6


def test_on_a_gpu_an_empty_kernel_tells_of_the_host_and_passes_of_the_device():
    samples = [sample("empty", "fp32", 6e-6)] + [
        sample("memory_pass", "fp32", b / 2.4e12 + 2e-6, moved=b, kernels=1)
        for b in (1e5, 1e6, 1e7, 1e8, 1e9)
    ]
    told = by_key(fit_passes(samples, host_is_device=False))
    assert told["constants.host_launch"] == 6e-6
    assert told["constants.kernel_gap"] == pytest.approx(2e-6, rel=0.02)


def test_products_give_sustained_rates_and_k_fill_back():
    samples = [
        gemm_sample(precision, peak, shape)
        for precision, peak in (("fp32", 1e11), ("bf16", 4e11))
        for shape in PRODUCTS
    ]
    told = by_key(fit_products(samples, 1, BANDWIDTH, GAP))
    for precision, peak in (("fp32", 1e11), ("bf16", 4e11)):
        sustained = told[f"device.peak_tflops.{precision}"] * told["constants.gemm_efficiency"]
        assert sustained == pytest.approx(0.8 * peak, rel=0.01)
    assert told["constants.k_fill"] == pytest.approx(100, rel=0.03)


def test_no_peak_is_below_what_a_product_reached():
    samples = [gemm_sample("fp32", 1e11, shape) for shape in PRODUCTS]
    samples += [gemm_sample("bf16", 4e11, shape, slowed=3.0) for shape in PRODUCTS[:-1]]
    samples += [gemm_sample("bf16", 4e11, PRODUCTS[-1])]  # one lucky sample
    told = by_key(fit_products(samples, 1, BANDWIDTH, GAP))
    for precision in ("fp32", "bf16"):
        best = max(s.flops / s.seconds for s in samples if s.precision == precision)
        assert told[f"device.peak_tflops.{precision}"] >= best * (1 - 1e-9)
    assert told["constants.gemm_efficiency"] <= 1


def test_attention_in_fp32_may_have_another_share_of_its_peak():
    peaks = {"fp32": 1e11, "bf16": 4e11}
    samples = [
        sample(
            name,
            precision,
            float(
                compute.attention(
                    attention_flops=flops,
                    length=length,
                    head_width=64,
                    kernels=1,
                    attention_efficiency=share * (3.0 if precision == "fp32" else 1.0),
                    length_fill=200,
                    peak=peaks[precision],
                    kernel_gap=GAP,
                ).seconds
            ),
            attention_flops=flops,
            length=length,
            head_width=64,
            kernels=1,
        )
        for precision in peaks
        for length in (64, 256, 1024)
        for name, share in (("attention_forward", 0.1), ("attention_backward", 0.07))
        for flops in (2.0 * 4 * length * length * 64,)
    ]
    told = by_key(fit_attention(samples, peaks, GAP))
    assert told["constants.attention_forward"] == pytest.approx(0.1, rel=0.01)
    assert told["constants.attention_backward"] == pytest.approx(0.07, rel=0.01)
    assert told["constants.length_fill"] == pytest.approx(200, rel=0.02)
    assert told["constants.fp32_attention"] == pytest.approx(3.0, rel=0.01)


def test_links_give_bandwidth_latency_and_start_back():
    true = (1.5e9, 2e-4, 1e-4)
    samples = [
        link_sample(formula, size, ranks, true)
        for formula in ("all_gather", "all_reduce", "all_to_all", "send")
        for size in (2**10, 2**17, 2**20, 2**24)
        for ranks in (2, 4)
    ]
    told = by_key(fit_links(samples))
    bandwidth = told["links.intra_node.gb_per_s"] * told["constants.intra_node_efficiency"]
    assert bandwidth == pytest.approx(1.5e9, rel=0.01)
    assert told["links.intra_node.latency_us"] == pytest.approx(2e-4, rel=0.01)
    assert told["constants.collective_start"] == pytest.approx(1e-4, rel=0.02)
    assert told["constants.intra_node_efficiency"] <= 1


def test_one_rank_has_no_links_to_fit():
    assert fit_links([]) == []
    assert fit_overlap([]) == []


@pytest.mark.parametrize(
    ("both", "slowdown"),
    [(0.03, 0.001), (0.035, 0.25), (0.05, 1.0), (0.2, 1.0)],  # hidden, in part, not at all, worse
)
def test_overlap_is_what_the_shorter_of_the_two_loses(both, slowdown):
    run = sample("overlap", "fp32", both, communication=0.02, hidden_by=0.03)
    assert by_key(fit_overlap([run]))["constants.overlap_slowdown"] == pytest.approx(slowdown)
    if slowdown < 1 or both == 0.05:
        exposed = compute.overlap(communication=0.02, hidden_by=0.03, slowdown=slowdown).exposed
        assert 0.03 + exposed == pytest.approx(both, abs=3e-5)


def test_the_basis_says_how_many_samples_and_how_well_they_fit():
    samples = [gemm_sample("fp32", 1e11, shape) for shape in PRODUCTS]
    assert fit_products(samples, 1, BANDWIDTH, GAP)[0].basis == "5 products, median error 0 %"
