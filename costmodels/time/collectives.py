"""Seconds of communication: collectives on their tiers, and what is left beside computation.

Which computation may hide what is a named assumption (`costmodels.time.overlap`).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodels.compiled import collectives, compute
from costmodels.compiled.compute import Value
from costmodels.network.ops import Collective
from costmodels.network.shard import Shard
from costmodels.time.overlap import Overlap
from costmodels.time.placement import Placement, Tiers
from costmodels.time.rates import Rates

Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """What prices depend on beside the ops themselves.

    Attributes:
        recompute_modules: Modules that selective recomputation runs again, with the share of them
            that it does.
        stops_early: Recomputation leaves the last product of a block out.

    """

    rates: Rates
    overlap: Overlap
    placement: Placement
    shard: Shard
    num_rows: int
    recompute_modules: tuple[tuple[str, float], ...]
    stops_early: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Seconds of a block's computation that may hide its communication.

    Attributes:
        products: Forward, input-gradient and weight-gradient seconds of each product, by name.
        attention: Forward and backward seconds of the attention kernel.
        computing: Seconds of all local work, by phase.

    """

    products: dict[str, Seconds]
    attention: Seconds
    computing: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class BothWays:
    """Seconds of a collective in forward and in backward.

    Attributes:
        alone: By itself.
        exposed: What it adds beside what hides it.

    """

    alone: tuple[Value, Value]
    exposed: tuple[Value, Value]


def collective_seconds(
    kind: str, payload: Value, tiers: Tiers, rates: Rates, across_share: Value = 1.0
) -> Value:
    """Return seconds of one collective; nothing for no payload.

    Args:
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "ring" (one step) or "".
        payload: Bytes of the full tensor.
        tiers: Where the group lies.
        rates: Bandwidths and latencies.
        across_share: Share of an all-to-all's copies that cross the network.

    """
    if not kind or tiers.ranks.max(initial=1) == 1 or not np.any(payload):
        return np.zeros(len(tiers.inner))
    links = {
        "payload": payload,
        "inner": tiers.inner,
        "outer": tiers.outer,
        "inner_bandwidth": rates.inner_bandwidth,
        "outer_bandwidth": rates.outer_bandwidth,
        "inner_latency": rates.inner_latency,
        "outer_latency": rates.outer_latency,
        "base_latency": rates.base_latency,
    }
    if kind == "all_reduce":
        seconds = collectives.all_reduce(**links).seconds
    elif kind == "all_to_all":
        links["outer_bandwidth"] *= rates.all_to_all_share
        seconds = collectives.all_to_all(across_share=across_share, **links).seconds
    elif kind == "ring":
        del links["inner"]
        seconds = collectives.send(**links).seconds
    else:
        seconds = collectives.all_gather(**links).seconds
    return seconds * (np.asarray(payload) > 0)


def _across_share(op: Collective, tiers: Tiers) -> Value:
    """Return the share of copies that cross the network when a token is sent once per node.

    Experts chosen at random put `copies` copies on outer * (1 - (1 - 1 / outer) ** copies) nodes.
    """
    if not op.once_per_node:
        return 1.0
    nodes = tiers.outer * (1 - (1 - 1 / tiers.outer) ** op.copies)
    if op.nodes_per_token:
        nodes = np.minimum(nodes, op.nodes_per_token)
    return nodes / op.copies


def price_collective(op: Collective, beside: Beside, pricing: Pricing) -> BothWays | None:
    """Price one collective of a block; None where no layout has it.

    Args:
        op: The collective.
        beside: What the block computes.
        pricing: Links, groups and habits.

    """
    tiers: Tiers = getattr(pricing.placement, op.group)
    if np.max(tiers.ranks) == 1 or not np.any(op.payload):
        return None
    forward, backward = _both_ways(op, tiers, pricing)
    if op.forward == "ring":
        return _ring(tiers, forward, 2 * backward, beside, pricing)
    if op.axis == "ep" and pricing.overlap.experts:
        # Dispatch and combine share what the other micro-batch computes.
        computing = beside.computing / 2
        hiding = computing[0], computing[1] + computing[2]
        exposed = (
            exposed_seconds(forward, hiding[0], pricing.rates),
            exposed_seconds(backward, hiding[1], pricing.rates),
        )
        return BothWays(alone=(forward, backward), exposed=exposed)
    if op.beside in beside.products and op.axis == "tp":
        return _beside_product(op, beside.products[op.beside], (forward, backward), tiers, pricing)
    return BothWays(alone=(forward, backward), exposed=(forward, backward))


def _ring(
    tiers: Tiers, forward: Value, backward: Value, beside: Beside, pricing: Pricing
) -> BothWays:
    """Pass keys and values around (and their gradients back), each step beside its attention."""
    steps = tiers.ranks - 1
    parts = beside.attention / (steps + 1)
    return BothWays(
        alone=(steps * forward, steps * backward),
        exposed=(
            steps * exposed_seconds(forward, parts[0], pricing.rates),
            steps * exposed_seconds(backward, parts[1], pricing.rates),
        ),
    )


def _both_ways(op: Collective, tiers: Tiers, pricing: Pricing) -> tuple[Value, Value]:
    """Return seconds by itself, forward and backward, with or without sequence parallelism."""
    rates, split = pricing.rates, pricing.shard.sequence_parallel
    across = _across_share(op, tiers) if op.forward == "all_to_all" else 1.0
    fed = np.any(op.experts)
    imbalance = 1 + rates.imbalance / np.sqrt(op.experts) if fed else 1.0
    ways = []
    for kind, plain, times in (
        (op.forward, op.plain_forward, 1),
        (op.backward, op.plain_backward, op.plain_backward_count),
    ):
        seconds = collective_seconds(kind, op.payload, tiers, rates, across) * imbalance
        if plain is not None:
            other = times * collective_seconds(plain, op.payload, tiers, rates)
            seconds = np.where(np.asarray(split) == 1, seconds, other)
        ways.append(seconds)
    return ways[0], ways[1]


def exposed_seconds(communication: Value, hidden_by: Value, rates: Rates) -> Value:
    """Return what communication adds beside computation that may hide it."""
    return compute.overlap(
        communication=communication,
        hidden_by=hidden_by,
        slowdown=rates.overlap_slowdown,
    ).exposed


def _beside_product(
    op: Collective, product: Seconds, ways: tuple[Value, Value], tiers: Tiers, pricing: Pricing
) -> BothWays:
    """Price a tensor-parallel collective beside the product that reads or makes its tensor."""
    forward, backward = ways
    overlap, rates = pricing.overlap, pricing.rates
    split = np.asarray(pricing.shard.sequence_parallel) == 1
    to_output, to_input, to_weight = product
    again: Value = 0.0
    if op.input_side and overlap.gathers_again:
        gather = collective_seconds("all_gather", op.payload, tiers, rates)
        again = exposed_seconds(gather * split, to_input, rates)
    beside_gradient = op.input_side and overlap.tensor_backward
    exposed = (
        forward,
        again + (exposed_seconds(backward, to_weight, rates) if beside_gradient else backward),
    )
    if overlap.tensor_pipelined:
        # All pieces but the first (or last) run beside the product's other pieces.
        share = (tiers.ranks - 1) / tiers.ranks
        pipelined = (
            exposed_seconds(forward, to_output * share, rates),
            again + exposed_seconds(backward, to_input * share, rates),
        )
        exposed = (
            np.where(split, pipelined[0], exposed[0]),
            np.where(split, pipelined[1], exposed[1]),
        )
    return BothWays(alone=ways, exposed=exposed)
