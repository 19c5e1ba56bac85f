"""Seconds of handing micro-batches from rank to rank of a pipeline.

Ranks of a pipeline fill one scale-up domain after another: of k neighbours that share a domain,
every k-th hop leaves it and takes the network.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodels.job import TrainingJob
from costmodels.layout_table import LayoutTable
from costmodels.model import ModelSpec
from costmodels.network.shard import shards_of
from costmodels.time.collectives import collective_seconds
from costmodels.time.overlap import scatters_hops
from costmodels.time.placement import Placement, Tiers
from costmodels.time.rates import Rates

Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hops:
    """Transfers of one micro-batch, one way; 0 without a pipeline. One entry per row.

    Attributes:
        far: One hop that leaves a domain, where there are such; else one inside it.
        near: One hop inside a domain.
        domain_ranks: Ranks of the pipeline that share a domain.
        way: All hops from the first rank to the last.
        way_ahead: The hops from the first rank to a rank, mean over the ranks.
        way_round: The hop from the last rank to the first, where a rank has several stages.

    """

    far: Seconds
    near: Seconds
    domain_ranks: NDArray[np.int64]
    way: Seconds
    way_ahead: Seconds
    way_round: Seconds


def pipeline_hops(
    model: ModelSpec, job: TrainingJob, table: LayoutTable, placement: Placement, rates: Rates
) -> Hops:
    """Return the hops of every layout of a table.

    Args:
        model: For the width of activations.
        job: What is trained.
        table: Layouts.
        placement: Of the table.
        rates: Of the machine.

    """
    p, k = table.pipeline_parallel, placement.pipeline.inner
    pair, one = np.minimum(p, 2), np.ones(len(table), dtype=np.int64)
    leaves = placement.pipeline.outer > 1
    across = Tiers(inner=np.where(leaves, one, pair), outer=np.where(leaves, pair, one))
    within = Tiers(inner=pair, outer=one)
    shard = shards_of(table, job)
    whole = rates.element_bytes * shard.outer_tokens * model.hidden_size

    def seconds(tiers: Tiers) -> Seconds:
        # Where every tensor-parallel rank holds all of them, some frameworks send a part from each
        # and gather the parts on the other side (Narayanan et al., arXiv:2104.04473, section 4.1).
        if scatters_hops(job):
            part = rates.element_bytes * shard.tokens * model.hidden_size / table.tensor_parallel
            gather = collective_seconds("all_gather", whole, placement.tensor, rates)
            whole_again = np.where(table.sequence_parallel == 1, 0.0, gather)
            taken = np.asarray(collective_seconds("ring", part, tiers, rates)) + whole_again
        else:
            taken = np.asarray(collective_seconds("ring", whole, tiers, rates))
        return np.where(p > 1, taken, 0.0)

    far, near = seconds(across), seconds(within)
    # floor(r / k) of the hops to rank r leave a domain; their sum over all ranks, in closed form.
    full = (p - 1) // k
    of_ranks = k * full * (full - 1) / 2 + full * (p - k * full)
    return Hops(
        far=far,
        near=near,
        domain_ranks=k,
        way=(p - 1) * near + full * (far - near),
        way_ahead=(p - 1) / 2 * near + of_ranks / p * (far - near),
        way_round=np.where(p > k, far, near),
    )
