"""Seconds of every block in every phase, by cause: ops priced with the compiled formulas.

Products are priced in one stacked call, so a block costs the same few numpy calls however many
ops it has.
"""

from dataclasses import dataclass

import numpy as np

from costmodels.compiled import compute
from costmodels.compiled.compute import Value
from costmodels.model import LayerKind
from costmodels.network.ops import (
    Attention,
    Block,
    Collective,
    Gemm,
    MemoryPass,
)
from costmodels.network.workload import Workload
from costmodels.time.collectives import (
    Beside,
    BothWays,
    Pricing,
    exposed_seconds,
    price_collective,
)
from costmodels.time.rates import Rates
from costmodels.time.tally import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    BlockCosts,
    Seconds,
    Tally,
)

AXIS_OF_CAUSE = {"tp_collectives": "tp", "cp_attention": "cp", "ep_dispatch": "ep"}
_CAUSE_OF_AXIS = {axis: cause for cause, axis in AXIS_OF_CAUSE.items()}
# Attention runs five products backward where it ran two forward: it makes the scores once more.
# Source: arXiv:2205.14135, algorithm 4.
_ATTENTION_BACKWARD = 2.5
_ATTENTION_KERNELS = (1, 3)
# Bytes that quantising one element adds: it is written twice in 8 bits, row-wise and column-wise,
# by the kernel that makes it (norm, activation), instead of once in 16. Kind: chosen.
_CAST_BYTES = 2
_LINE_ELEMENTS = 64  # 16-bit elements of a 128-byte line
# fp32 gradients are read, added to and written once per micro-batch; products in fp32 leave theirs
# in memory first, where narrower ones are read by the kernel that adds.
_ACCUMULATE_BYTES = {2: 8, 4: 12}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadCosts:
    """Costs of every distinct block of a network."""

    embedding: BlockCosts
    layers: tuple[tuple[LayerKind, BlockCosts], ...]
    head: BlockCosts


def price_workload(workload: Workload, pricing: Pricing) -> WorkloadCosts:
    """Price every block of a network.

    Args:
        workload: Blocks under the shards of `pricing`.
        pricing: Rates, groups and habits.

    """
    gemms = _gemm_seconds(workload, pricing)
    return WorkloadCosts(
        embedding=_price_block(workload.embedding, gemms, pricing),
        layers=tuple(
            (kind, _price_block(block, gemms, pricing)) for kind, block in workload.layers
        ),
        head=_price_block(workload.head, gemms, pricing),
    )


def _gemm_seconds(workload: Workload, pricing: Pricing) -> dict[int, Seconds]:
    """Return forward, input-gradient and weight-gradient seconds of each product, by its id."""
    rates, rows = pricing.rates, pricing.num_rows
    ops = [op for block in workload.blocks for op in block.ops if isinstance(op, Gemm)]
    shapes = np.empty((4, 3 * len(ops), rows))
    low = np.array([op.quantised for op in ops for _ in range(3)])[:, None]
    rate = np.repeat([_alignment(op, rates) * np.ones(rows) for op in ops], 3, axis=0)
    for i, op in enumerate(ops):
        is_grouped = op.module == "moe" and op.name != "router"
        m = op.m * (1 + rates.imbalance / np.sqrt(op.count) if is_grouped else 1.0)
        orders = (
            (m, op.n, op.k),
            (m, op.k, op.n),
            (op.n, op.k, m) if op.weight else (op.k, op.n, m),
        )
        for phase, shape in enumerate(orders):
            for axis, size in enumerate(shape):
                shapes[axis, 3 * i + phase] = size
            shapes[3, 3 * i + phase] = op.count
    m, n, k, count = shapes
    seconds = compute.gemm(
        m=m,
        n=n,
        k=k,
        count=count,
        element_bytes=rates.element_bytes,
        peak=np.where(low, rates.low_peak, rates.peak),
        gemm_efficiency=rate * np.where(low, rates.low_gemm_efficiency, rates.gemm_efficiency),
        k_fill=np.where(low, rates.low_k_fill, rates.k_fill),
        num_sms=rates.num_sms,
        tail_share=rates.tail_share,
        memory_bandwidth=rates.memory_bandwidth,
        memory_efficiency=rates.memory_efficiency,
        kernel_gap=rates.kernel_gap,
    ).seconds
    return {id(op): seconds[3 * i : 3 * i + 3] for i, op in enumerate(ops)}


def _alignment(op: Gemm, rates: Rates) -> Value:
    """Return the relative rate of a product by the alignment of its matrices' rows.

    Tensor cores want rows of whole 128-byte lines. Source: NVIDIA, "Matrix Multiplication
    Background User's Guide" (DU-10801-001), section 2.
    """
    misaligned = (op.n % _LINE_ELEMENTS != 0) | (op.k % _LINE_ELEMENTS != 0)
    return np.where(misaligned, rates.misaligned, 1.0)


def _price_block(block: Block, gemms: dict[int, Seconds], pricing: Pricing) -> BlockCosts:
    tally = Tally(block, pricing)
    by_name = {op.name: gemms[id(op)] for op in block.ops if isinstance(op, Gemm)}
    attention = np.zeros((2, pricing.num_rows))
    for op in block.ops:
        if isinstance(op, Gemm):
            _price_gemm(op, gemms[id(op)], tally, pricing)
        elif isinstance(op, MemoryPass):
            _price_pass(op, tally, pricing.rates)
        elif isinstance(op, Attention):
            attention = _price_attention(op, tally, pricing.rates)
    # Collectives last: what hides them has been priced by then.
    beside = Beside(products=by_name, attention=attention, computing=tally.exposed.sum(axis=1))
    for op in block.ops:
        if isinstance(op, Collective):
            _add_collective(op, price_collective(op, beside, pricing), tally, pricing.rates)
    return tally.finish(pricing.rates.host_launch)


def _add_collective(op: Collective, ways: BothWays | None, tally: Tally, rates: Rates) -> None:
    if ways is None:
        return
    cause = _CAUSE_OF_AXIS[op.axis]
    # Calling a collective costs the host as much as calling a layer.
    calls = 1 + rates.module_launches
    launches = [calls * (np.asarray(seconds) > 0) for seconds in ways.alone]
    tally.add_forward(op, cause, ways.exposed[0], launches[0], alone=ways.alone[0])
    tally.add(BACKWARD_INPUT, cause, ways.exposed[1], launches[1], alone=ways.alone[1])


def _price_gemm(op: Gemm, seconds: Seconds, tally: Tally, pricing: Pricing) -> None:
    rates = pricing.rates
    forward, to_input, to_weight = seconds
    cause = "matmul" if op.module != "core_attn" else "attention"
    # Grouped products are one launch per expert (Transformer Engine, on several streams), and
    # calling the module costs as much as some launches.
    launches = rates.module_launches + (op.count if op.weight else 1)
    tally.add_forward(op, cause, forward, launches)
    tally.add(BACKWARD_INPUT, cause, to_input, launches)
    if not op.weight:
        tally.add(BACKWARD_INPUT, cause, to_weight)
    elif op.trained:
        tally.add(BACKWARD_WEIGHT, cause, to_weight, launches)
        accumulate = _moved_seconds(
            _ACCUMULATE_BYTES[rates.element_bytes] * op.n * op.k * op.count, 0, rates
        )
        if pricing.overlap.accumulation:
            accumulate = exposed_seconds(accumulate, to_weight, rates)
        tally.add(BACKWARD_WEIGHT, "memory_bound", accumulate, 0)
    if rates.casts and op.quantised:
        inputs = _CAST_BYTES * op.m * op.k * op.count
        gradients = _CAST_BYTES * op.m * op.n * op.count
        tally.add_forward(op, "memory_bound", _moved_seconds(inputs, 1, rates), 2 * launches)
        tally.add(BACKWARD_INPUT, "memory_bound", _moved_seconds(gradients, 1, rates), launches)


def _moved_seconds(moved: Value, kernels: int, rates: Rates) -> Value:
    return compute.memory_pass(
        moved=moved,
        kernels=kernels,
        kernel_gap=rates.kernel_gap,
        memory_bandwidth=rates.memory_bandwidth,
        memory_efficiency=rates.memory_efficiency,
    ).seconds


def _price_pass(op: MemoryPass, tally: Tally, rates: Rates) -> None:
    if op.host_waits:
        tally.wait_for_device(rates.host_sync)
    forward = _moved_seconds(op.forward, op.forward_kernels, rates)
    tally.add_forward(op, op.cause, forward, op.forward_kernels)
    backward = _moved_seconds(op.backward, op.backward_kernels, rates)
    tally.add(BACKWARD_INPUT, op.cause, backward, op.backward_kernels)


def _price_attention(op: Attention, tally: Tally, rates: Rates) -> Seconds:
    common = {
        "length": op.length,
        "length_fill": rates.length_fill,
        "head_width": op.head_width,
        "peak": rates.peak,
        "kernel_gap": rates.kernel_gap,
    }
    forward_kernels, backward_kernels = _ATTENTION_KERNELS
    forward = compute.attention(
        attention_flops=op.flops,
        attention_efficiency=rates.attention_forward,
        kernels=forward_kernels,
        **common,
    ).seconds
    backward = compute.attention(
        attention_flops=_ATTENTION_BACKWARD * op.flops,
        attention_efficiency=rates.attention_backward,
        kernels=backward_kernels,
        **common,
    ).seconds
    tally.add_forward(op, "attention", forward, forward_kernels)
    tally.add(BACKWARD_INPUT, "attention", backward, backward_kernels)
    return np.stack(np.broadcast_arrays(forward, backward))
