"""From samples to constants: each is fitted to the formula that the cost model prices it with.

    passes      memory_pass           memory bandwidth and what of it is sustained, kernel gap
    products    gemm                  peaks, gemm_efficiency, k_fill
    attention   attention             attention_forward, attention_backward, length_fill
    links       all_gather ...        bandwidth, latency of a hop, collective_start
    overlap     overlap               overlap_slowdown

`program_fit.py` then finds what programs sustain of these rates.

A rate and its efficiency are only told apart by what is peak: here the best that any sample
reached. Their product is what the fit finds.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from costmodels.compiled import collectives, compute
from costmodels.least_squares import Fit, Unknown, fit
from costmodels.profiles.reader import own_constants
from runtime.measure.samples import Sample

Vector = NDArray[np.float64]

NEVER = 1e30  # bandwidth of the tier that a group on one host does not cross


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One constant, by the key of a profile, and how well it fits.

    Attributes:
        key: "constants.k_fill", "device.peak_tflops.bf16" ... ; the value is in SI.
        basis: What it was found from, for the profile's `source`.

    """

    key: str
    value: float
    basis: str


def fit_passes(samples: Sequence[Sample], *, host_is_device: bool) -> list[Found]:
    """Find memory bandwidth, its sustained share, and what each kernel costs beside its work.

    Args:
        samples: Those of "memory_pass" and one of "empty".
        host_is_device: An empty kernel's time is the device's too (CPU); otherwise launches run
            ahead of the device, and it is the host's alone.

    """
    passes = [s for s in samples if s.formula == "memory_pass"]
    empty = next(s.seconds for s in samples if s.formula == "empty")
    best = max(s["moved"] / s.seconds for s in passes)

    def predict(values: Vector) -> Vector:
        return _vector(
            compute.memory_pass(
                moved=s["moved"],
                kernels=s["kernels"],
                kernel_gap=values[1],
                memory_bandwidth=best,
                memory_efficiency=values[0],
            ).seconds
            for s in passes
        )

    gap = min(empty, 1e-3)
    found = fit(
        predict,
        [s.seconds for s in passes],
        [
            Unknown(name="memory_efficiency", start=0.7, low=0.02, high=1.0),
            Unknown(name="kernel_gap", start=gap, low=gap if host_is_device else 1e-7, high=gap),
        ],
    )
    basis = _basis(found, "element-wise sums")
    return [
        Found(key="device.memory_gb_per_s", value=best, basis=f"best of {len(passes)} sums"),
        Found(key="constants.memory_efficiency", value=found.values[0], basis=basis),
        Found(key="constants.kernel_gap", value=found.values[1], basis=basis),
        Found(key="constants.host_launch", value=empty, basis="one empty kernel"),
    ]


def fit_products(
    samples: Sequence[Sample], num_sms: int, memory_bandwidth: float, gap: float
) -> list[Found]:
    """Find peaks, the share of them that large products sustain, and the loss of short ones.

    Args:
        samples: Those of "gemm", in any number of formats.
        num_sms: Multiprocessors, for waves of tiles.
        memory_bandwidth: Sustained bytes/s.
        gap: Seconds that each kernel loses.

    """
    products = [s for s in samples if s.formula == "gemm"]
    formats = sorted({s.precision for s in products})
    # Too few products end in a part of a wave to tell; the common constant stands.
    tail_share = own_constants("common")["tail_share"].value
    assert isinstance(tail_share, Decimal | int)  # checked by the reader
    best = {f: max(s.flops / s.seconds for s in products if s.precision == f) for f in formats}

    def predict(values: Vector) -> Vector:
        rates = dict(zip(formats, values, strict=False))
        return _vector(
            compute.gemm(
                **dict(s.arguments),
                peak=rates[s.precision],
                gemm_efficiency=1.0,
                k_fill=values[-1],
                num_sms=num_sms,
                tail_share=float(tail_share),
                memory_bandwidth=memory_bandwidth,
                memory_efficiency=1.0,
                kernel_gap=gap,
            ).seconds
            for s in products
        )

    found = fit(
        predict,
        [s.seconds for s in products],
        [
            *(Unknown(name=f, start=best[f], low=best[f] / 20, high=best[f] * 2) for f in formats),
            Unknown(name="k_fill", start=32, low=1, high=2048),
        ],
    )
    sustained = dict(zip(formats, found.values, strict=False))
    # One share for all formats, and no peak below what a product reached.
    efficiency = min(1.0, *(sustained[f] / best[f] for f in formats))
    basis = _basis(found, "products")
    return [
        *(
            Found(key=f"device.peak_tflops.{f}", value=sustained[f] / efficiency, basis=basis)
            for f in formats
        ),
        Found(key="constants.gemm_efficiency", value=efficiency, basis=basis),
        Found(key="constants.k_fill", value=found.values[-1], basis=basis),
    ]


def fit_attention(samples: Sequence[Sample], peaks: dict[str, float], gap: float) -> list[Found]:
    """Find the shares of the peaks that attention sustains, and the length that halves them.

    Args:
        samples: Those of "attention_forward" and "attention_backward", in fp32 and a 16-bit
            format, or in the latter alone.
        peaks: FLOP/s by format.
        gap: Seconds that each kernel loses.

    """
    names = ("attention_forward", "attention_backward")
    runs = [s for s in samples if s.formula in names]
    has_fp32 = any(s.precision == "fp32" for s in runs)

    def predict(values: Vector) -> Vector:
        return _vector(
            compute.attention(
                **dict(s.arguments),
                attention_efficiency=values[names.index(s.formula)]
                * (values[3] if s.precision == "fp32" else 1.0),
                length_fill=values[2],
                peak=peaks[s.precision],
                kernel_gap=gap,
            ).seconds
            for s in runs
        )

    keys = (*names, "length_fill", *(("fp32_attention",) if has_fp32 else ()))
    found = fit(
        predict,
        [s.seconds for s in runs],
        [
            *(Unknown(name=name, start=0.3, low=0.005, high=3.0) for name in names),
            Unknown(name="length_fill", start=100, low=1, high=5000),
            *(Unknown(name=name, start=1.0, low=0.05, high=20.0) for name in keys[3:]),
        ],
    )
    basis = _basis(found, "attention kernels")
    return [
        Found(key=f"constants.{key}", value=value, basis=basis)
        for key, value in zip(keys, found.values, strict=True)
    ]


def fit_links(samples: Sequence[Sample]) -> list[Found]:
    """Find bandwidth, its sustained share, latency of a hop, and the start of a collective."""
    runs = [s for s in samples if s.formula in _EXCHANGES]
    if not runs:
        return []
    best = max(s["payload"] / s.seconds for s in runs if s.formula == "send")

    def predict(values: Vector) -> Vector:
        bandwidth, hop, start = values
        return _vector(
            _EXCHANGES[s.formula](
                **dict(s.arguments),
                base_latency=start,
                inner_bandwidth=bandwidth,
                inner_latency=hop,
                outer_bandwidth=NEVER,
                outer_latency=0.0,
            ).seconds
            for s in runs
        )

    quickest = min(s.seconds for s in runs)
    found = fit(
        predict,
        [s.seconds for s in runs],
        [
            Unknown(name="bandwidth", start=best, low=best / 100, high=best * 10),
            Unknown(name="latency", start=quickest / 2, low=quickest / 1e3, high=1.0),
            Unknown(name="collective_start", start=quickest / 2, low=quickest / 1e3, high=1.0),
        ],
    )
    bandwidth, hop, start = found.values
    link = max(best, bandwidth)
    basis = _basis(found, "transfers")
    return [
        Found(key="links.intra_node.gb_per_s", value=link, basis=basis),
        Found(key="constants.intra_node_efficiency", value=bandwidth / link, basis=basis),
        Found(key="links.intra_node.latency_us", value=hop, basis=basis),
        Found(key="constants.collective_start", value=start, basis=basis),
    ]


def fit_overlap(samples: Sequence[Sample]) -> list[Found]:
    """Find the share of its time that computation loses beside communication.

    both = max(communication, computation) + slowdown * min(communication, computation)
    """
    runs = [s for s in samples if s.formula == "overlap"]
    if not runs:
        return []
    lost = [
        (s.seconds - max(s["communication"], s["hidden_by"]))
        / min(s["communication"], s["hidden_by"])
        for s in runs
    ]
    slowdown = float(np.clip(np.median(lost), 0.001, 1.0))
    basis = "products beside a reduce-scatter, against each alone"
    return [Found(key="constants.overlap_slowdown", value=slowdown, basis=basis)]


def _all_to_all(**arguments: float) -> collectives.AllToAll:
    return collectives.all_to_all(across_share=1.0, **arguments)


class _Priced(Protocol):
    @property
    def seconds(self) -> Any: ...  # noqa: ANN401  (as the compiled formulas have it)


_EXCHANGES: dict[str, Callable[..., _Priced]] = {
    "all_gather": collectives.all_gather,
    "all_reduce": collectives.all_reduce,
    "all_to_all": _all_to_all,
    "send": collectives.send,
}


def _vector(values: Iterable[float]) -> Vector:
    return np.fromiter(values, dtype=np.float64)


def _basis(found: Fit, what: str) -> str:
    return f"{len(found.errors)} {what}, median error {100 * found.median_error:.0f} %"
