"""Ops: the units of work that a block of a network is made of, in shapes of one rank.

Sizes are those of one micro-batch on one rank, as Python integers for one layout (then counts are
exact) or as int64 arrays for a table of them. Ops say what is done, never how long it takes:
`time.blocks` prices them and `counts.ranks` counts them.
"""

from dataclasses import dataclass, replace
from typing import Any

Size = Any  # int, or an int64 array with one entry per layout

HALF = 2  # bytes of a 16-bit element
FULL = 4  # bytes of an fp32 element


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """A matrix product, m x k times k x n; `count` of one shape in one launch.

    Attributes:
        module: What selective recomputation calls the part it belongs to.
        weight: The k x n operand is a weight (or a batch of experts' weights); otherwise both
            operands are activations and both gradients belong to backward_input.
        trained: The weight gets a gradient.
        quantised: Runs in the low precision of the job; router and head stay in 16 bits.

    """

    name: str
    module: str
    m: Size
    n: Size
    k: Size
    count: Size = 1
    weight: bool = True
    trained: bool = True
    quantised: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Attention in one kernel that keeps its scores on chip.

    Attributes:
        flops: Forward FLOPs: queries x the keys that they see x both products.
        length: Tokens of a sequence that one kernel call sees.
        head_width: Width of keys (and of values where these are narrower).

    """

    name: str
    module: str
    flops: Size
    length: Size
    head_width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPass:
    """Kernels that only move memory.

    Attributes:
        forward: Bytes read and written.
        backward: Bytes read and written.
        forward_kernels: Launches.
        backward_kernels: Launches.
        cause: The term that it counts under.
        host_waits: The host reads the result (how many tokens go where) before it goes on.
        follows_precision: Bytes are stated for 16-bit elements; `widened` doubles them in fp32.

    """

    name: str
    module: str
    forward: Size
    backward: Size
    forward_kernels: int = 1
    backward_kernels: int = 1
    cause: str = "memory_bound"
    host_waits: bool = False
    follows_precision: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Communication inside a block.

    Attributes:
        axis: "tp", "cp" or "ep".
        group: Name of the group in Placement.
        forward: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "ring" or "" for none;
            with sequence parallelism where that makes a difference.
        backward: The same for backward.
        plain_forward: What stands there without sequence parallelism; None for the same.
        plain_backward: The same for backward.
        plain_backward_count: How often that is done: once per product whose input has a gradient of
            its own.
        payload: Bytes of the full tensor (all_to_all: what a rank sends; ring: what it passes on
            in one step).
        beside: The product that reads or makes the tensor: what may hide the communication.
        input_side: The tensor is that product's input, so the communication of its gradient may
            run beside the product's weight gradient.
        copies: Copies of each token in an all_to_all.
        nodes_per_token: Most nodes that a token may visit; 0 for any number.
        experts: Experts of a rank that an all_to_all feeds; 0 elsewhere.
        once_per_node: The dispatcher sends one copy of a token to each node, not one per expert.
        follows_precision: As of MemoryPass; numbers of rows and sums in fp32 do not.

    """

    name: str
    module: str
    axis: str
    group: str
    forward: str
    backward: str
    plain_forward: str | None = None
    plain_backward: str | None = None
    plain_backward_count: int = 1
    payload: Size
    beside: str = ""
    input_side: bool = False
    copies: int = 1
    nodes_per_token: int = 0
    experts: Size = 0
    once_per_node: bool = False
    follows_precision: bool = True


Op = Gemm | Attention | MemoryPass | Collective


def widened(op: Op) -> Op:
    """Return an op of a 16-bit job as an fp32 job has it: twice the bytes."""
    if isinstance(op, MemoryPass) and op.follows_precision:
        return replace(op, forward=2 * op.forward, backward=2 * op.backward)
    if isinstance(op, Collective) and op.follows_precision:
        return replace(op, payload=2 * op.payload)
    return op


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Ops in the order of the forward pass; each reads what the one before it made."""

    name: str
    ops: tuple[Op, ...]


# Ops that keep the results of products for backward, to weigh them.
_WEIGHED_RESULTS = ("unpermute", "shared_gate_product")


def skipped_by_recompute(block: Block) -> frozenset[str]:
    """Return the names of ops that full recomputation by torch's checkpointing leaves out.

    torch.utils.checkpoint stops as soon as it has made what backward needs, so the block's last
    product and the collectives behind it do not run again. Where that product's result is weighed
    afterwards (experts, gates), backward needs it, and nothing is left out.
    """
    names: set[str] = set()
    for op in reversed(block.ops):
        if op.name in _WEIGHED_RESULTS:
            break
        if isinstance(op, Collective):
            names.add(op.name)
        elif isinstance(op, Gemm):
            names.add(op.name)
            break
    return frozenset(names)
