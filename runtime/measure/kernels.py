"""Samples of local work: matrix products, attention, passes over memory, empty kernels.

Shapes are those of a decoder's layers on this kind of device: a row of the table is one projection
of a small or a larger model.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from costmodels.units import KIB, MIB
from runtime.measure.samples import Sample, sample
from runtime.measure.stopwatch import Stopwatch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HEAD_WIDTH = 64
# Operands and results go round through this much memory that the process already has, as weights
# and activations do: out of cache, but without the system's handing out of fresh pages, which a
# trainer pays in its first step and which would be most of a pass on a CPU.
ROUND_BYTES = {"cpu": 128 * MIB, "cuda": 2**30}
EMPTY_ELEMENTS = 16
# Causal kernels compute half the square: 2 products of 2 S^2 d / 2, and 5 backward.
# Source: arXiv:2205.14135, algorithm 4.
FORWARD_FLOPS = 2.0
BACKWARD_FLOPS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """What is measured on one kind of device.

    Attributes:
        products: (tokens, inputs, outputs) of linear layers.
        lengths: Sequence lengths of attention.
        num_heads: Heads of attention.
        passes: Bytes of one operand of an element-wise sum.

    """

    products: tuple[tuple[int, int, int], ...]
    lengths: tuple[int, ...]
    num_heads: int
    passes: tuple[int, ...]


SHAPES = {
    "cpu": Shapes(
        products=(
            (64, 256, 256),
            (256, 256, 256),
            (256, 512, 512),
            (512, 384, 1536),
            (512, 1536, 384),
            (512, 512, 4096),
            (1024, 1024, 1024),
        ),
        lengths=(64, 256, 512, 1024),
        num_heads=4,
        passes=(256 * KIB, MIB, 4 * MIB, 16 * MIB),
    ),
    "cuda": Shapes(
        products=(
            (512, 1024, 1024),
            (2048, 2048, 2048),
            (4096, 1024, 4096),
            (4096, 4096, 4096),
            (4096, 4096, 14336),
            (8192, 8192, 1024),
            (8192, 8192, 8192),
            (4096, 4096, 128256),
        ),
        lengths=(512, 2048, 4096, 8192),
        num_heads=32,
        passes=(MIB, 16 * MIB, 64 * MIB, 256 * MIB),
    ),
}


def kernel_samples(watch: Stopwatch) -> Iterator[Sample]:
    """Measure every kernel on this device, on all ranks at once.

    Args:
        watch: Times calls; its device decides what is measured.

    """
    shapes, device = SHAPES[watch.device.type], watch.device
    empty = torch.zeros(EMPTY_ELEMENTS, device=device)
    yield sample("empty", "fp32", watch.seconds(lambda: empty + empty))
    for size in shapes.passes:
        yield _pass_sample(watch, size)
    for precision in precisions(device):
        for tokens, inputs, outputs in shapes.products:
            yield from _product_samples(watch, precision, (tokens, inputs, outputs))
    half = precisions(device)[-1]
    for precision in dict.fromkeys(("fp32", half)) if device.type == "cpu" else (half,):
        for length in shapes.lengths:
            yield from _attention_samples(watch, precision, length, shapes.num_heads)


def precisions(device: torch.device) -> tuple[str, ...]:
    """Return the number formats that the device multiplies natively, widest first."""
    if device.type == "cpu":
        return ("fp32", "bf16")
    has_bf16 = torch.cuda.get_device_capability(device) >= (8, 0) or torch.version.hip is not None
    return ("fp32", "fp16", "bf16") if has_bf16 else ("fp32", "fp16")


def _pass_sample(watch: Stopwatch, size: int) -> Sample:
    count = max(2, ROUND_BYTES[watch.device.type] // (3 * size))
    operands = [
        tuple(torch.ones(size // 4, device=watch.device) for _ in range(3)) for _ in range(count)
    ]

    def go_round() -> None:
        for x, y, result in operands:
            torch.add(x, y, out=result)

    seconds = watch.seconds(go_round) / count
    return sample("memory_pass", "fp32", seconds, moved=3 * size, kernels=1)


def _product_samples(
    watch: Stopwatch, precision: str, shape: tuple[int, int, int]
) -> Iterator[Sample]:
    """Measure a linear layer forward, and its weight's gradient: two orders of the operands.

    As in a network, every product finds operands that nobody has touched for a while.
    """
    tokens, inputs, outputs = shape
    dtype = DTYPES[precision]
    elements = tokens * inputs + outputs * inputs + tokens * outputs
    count = max(2, ROUND_BYTES[watch.device.type] // (elements * dtype.itemsize))
    sets = [
        tuple(
            torch.full(sizes, 0.5, dtype=dtype, device=watch.device)
            for sizes in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
        )
        for _ in range(count)
    ]

    def forward() -> None:
        for x, weight, _ in sets:
            functional.linear(x, weight)

    def to_weight() -> None:
        for x, _, gradient in sets:
            torch.mm(gradient.t(), x)

    calls: tuple[tuple[Callable[[], None], tuple[int, int, int]], ...] = (
        (forward, (tokens, outputs, inputs)),
        (to_weight, (outputs, inputs, tokens)),
    )
    for call, (m, n, k) in calls:
        yield sample(
            "gemm",
            precision,
            watch.seconds(call) / count,
            m=m,
            n=n,
            k=k,
            count=1,
            element_bytes=dtype.itemsize,
        )


def _attention_samples(
    watch: Stopwatch, precision: str, length: int, num_heads: int
) -> Iterator[Sample]:
    """Measure causal attention forward; and backward, as what it adds."""
    shape = (1, num_heads, length, HEAD_WIDTH)
    query, key, value = (
        torch.randn(shape, dtype=DTYPES[precision], device=watch.device, requires_grad=True)
        for _ in range(3)
    )
    out_gradient = torch.randn(shape, dtype=DTYPES[precision], device=watch.device)

    def forward() -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    def both() -> object:
        return torch.autograd.grad(forward(), (query, key, value), out_gradient)

    square = float(num_heads * length * length * HEAD_WIDTH)
    ahead = watch.seconds(forward)
    # The difference of two clocks may be anything on a busy machine; half a forward it always is.
    back = max(watch.seconds(both) - ahead, ahead / 2)
    for name, seconds, flops, kernels in (
        ("attention_forward", ahead, FORWARD_FLOPS * square, 1),
        ("attention_backward", back, BACKWARD_FLOPS * square, 3),
    ):
        yield sample(
            name,
            precision,
            seconds,
            attention_flops=flops,
            length=length,
            head_width=HEAD_WIDTH,
            kernels=kernels,
        )
