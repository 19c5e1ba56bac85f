"""Seconds of collectives and point-to-point messages on two tiers: the alpha-beta model.

A group of n = inner * outer ranks has `inner` of them in each scale-up domain (NVLink, xGMI,
PCIe) and spans `outer` domains joined by the network. A tensor of B bytes is cut into n shards.
Rings pass through all ranks, as NCCL's do, one ring per network port of a domain: every shard but
one crosses each link of its ring, so that a domain's ports carry what its scale-up links do, also
shards that began in that domain and come back to the ranks before their own.

    all_gather     = (n - 1) / n * B / min(b_inner, inner * b_outer) + latency
    reduce_scatter = all_gather
    all_reduce     = reduce_scatter + all_gather, with the latency of a ring or of a tree

B is always the size of the *full* tensor; bandwidths are per GPU and direction. Latency of a ring
counts all its n - 1 hops; that of a tree the depth of a doubling tree, both ways.

Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH", IJHPCA 2005, sections 4.1-4.5; double binary trees: Sanders, Speck and Traff, "Two-tree
algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 35 (2009).
"""

import sympy
from sympy import Expr

from costmodels.formulas.functions import Formula, Maximum, Minimum
from costmodels.symbols import Quantity

payload = Quantity("payload", "bytes", "the full tensor (all-to-all: what a rank sends)")
inner = Quantity("inner", "1", "ranks of the group in one scale-up domain")
outer = Quantity("outer", "1", "scale-up domains that the group spans")
inner_bandwidth = Quantity("inner_bandwidth", "bytes/s", "scale-up bandwidth of a GPU, one way")
outer_bandwidth = Quantity("outer_bandwidth", "bytes/s", "network bandwidth of a GPU, one way")
inner_latency = Quantity("inner_latency", "s", "one hop in the scale-up domain")
outer_latency = Quantity("outer_latency", "s", "one hop over the network")
across_share = Quantity(
    "across_share", "1", "share of an all-to-all's copies that cross the network one by one"
)
base_latency = Quantity("base_latency", "s", "starting a collective: kernel launch and handshake")


def _ring_seconds() -> Expr:
    """Return the bandwidth term of one pass of a ring (all-gather or reduce-scatter)."""
    ranks = inner * outer
    passed = (ranks - 1) / ranks * payload
    within, across = passed / inner_bandwidth, passed / (inner * outer_bandwidth)
    # A group of one domain has no network term, one rank per domain no scale-up term.
    return Maximum(within * Minimum(inner - 1, 1), across * Minimum(outer - 1, 1))


def _ring_latency() -> Expr:
    """Return the latency of one pass: n - 1 hops, outer - 1 of them over the network."""
    return (inner - 1) * outer * inner_latency + (outer - 1) * outer_latency


def _tree_latency() -> Expr:
    """Return the latency of reducing to a root and coming back."""
    depth = sympy.log(outer) / sympy.log(2)
    return 2 * (inner - 1) * inner_latency + 2 * depth * outer_latency


def _started() -> Expr:
    """Return the start-up cost, nothing for a group of one rank."""
    return base_latency * Minimum(inner * outer - 1, 1)


def all_gather_seconds() -> Expr:
    """Return the time for each rank to hold the full tensor; reduce-scatter takes the same."""
    return _started() + _ring_latency() + _ring_seconds()


def all_reduce_seconds() -> Expr:
    """Return the time to sum a tensor on all ranks, over rings or a double binary tree."""
    return _started() + Minimum(2 * _ring_latency(), _tree_latency()) + 2 * _ring_seconds()


def all_to_all_seconds() -> Expr:
    """Return the time to exchange a shard with each rank; every pair talks directly.

    A dispatcher that sends a token once per node, and copies it there, carries only
    `across_share` of the payload over the network.
    """
    ranks = inner * outer
    within = payload * (inner - 1) / ranks / inner_bandwidth
    across = across_share * payload * (ranks - inner) / ranks / outer_bandwidth
    latency = Minimum(inner - 1, 1) * inner_latency + Minimum(outer - 1, 1) * outer_latency
    return _started() + latency + Maximum(within, across)


def send_seconds() -> Expr:
    """Return the time of a message to a neighbour (outer = 2 over the network, else 1)."""
    over_network = Minimum(outer - 1, 1)
    within = inner_latency + payload / inner_bandwidth
    across = outer_latency + payload / outer_bandwidth
    return base_latency + over_network * across + (1 - over_network) * within


def formulas() -> tuple[Formula, ...]:
    """Return the formulas of this module."""
    return (
        Formula(
            name="all_gather",
            summary="Seconds of an all-gather or a reduce-scatter.",
            results=(("seconds", all_gather_seconds()),),
        ),
        Formula(
            name="all_reduce",
            summary="Seconds of an all-reduce.",
            results=(("seconds", all_reduce_seconds()),),
        ),
        Formula(
            name="all_to_all",
            summary="Seconds of an all-to-all.",
            results=(("seconds", all_to_all_seconds()),),
        ),
        Formula(
            name="send",
            summary="Seconds of a point-to-point message.",
            results=(("seconds", send_seconds()),),
        ),
    )
