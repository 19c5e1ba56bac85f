"""Seconds per block for every layout of a table: what estimate, bounds and the solver share.

Blocks are priced once per distinct shard (tensor, context and expert degrees, micro-batch, where
their groups lie), then looked up per layout; ZeRO-3's gathers, the pipeline's hops and the states
depend on more columns and are cheap enough to price per layout.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodels.hardware import Cluster
from costmodels.job import Target, TrainingJob
from costmodels.layout import Recompute
from costmodels.layout_table import RECOMPUTES, LayoutTable
from costmodels.model import LayerKind, ModelSpec
from costmodels.network.shard import shards_of
from costmodels.network.workload import build_workload
from costmodels.rows import take_rows
from costmodels.time.blocks import WorkloadCosts, price_workload
from costmodels.time.collectives import Pricing, exposed_seconds
from costmodels.time.hops import Hops, pipeline_hops
from costmodels.time.host_transfers import seconds_to_host
from costmodels.time.overlap import overlap_of
from costmodels.time.placement import Placement, place
from costmodels.time.rank_weights import RankWeights, embedding_weights, head_weights, layer_weights
from costmodels.time.rates import Rates, rates_of
from costmodels.time.recompute_modules import module_shares
from costmodels.time.states import BlockGathers, StateCosts, block_gathers, state_costs
from costmodels.time.tally import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    RECOMPUTE,
    SELECTIVE,
    BlockCosts,
)

Seconds = NDArray[np.float64]

SELECTIVE_CODE = RECOMPUTES.index(Recompute.SELECTIVE)
FULL_CODE = RECOMPUTES.index(Recompute.FULL)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTimes:
    """Seconds of one micro-batch in one block, one entry per layout.

    Attributes:
        forward: With what ZeRO-3's gathers and offloaded activations add.
        backward_input: With selective recomputation and what ZeRO-3's gathers and reductions and
            offloaded activations add.
        backward_weight: Gradients of weights.
        recompute: What full recomputation of the block adds to backward.
        gathers: What ZeRO-3 moves, by itself.
        gather_exposed: Part of `forward` that is the gather.
        backward_exposed: Part of `backward_input` that is the gather and the reduction.
        offload: Moving activations to the host and back, by itself.
        offload_exposed: Part of `forward` and `backward_input` that is this.
        weights: Weights of the block on its rank.

    """

    forward: Seconds
    backward_input: Seconds
    backward_weight: Seconds
    recompute: Seconds
    gathers: BlockGathers
    gather_exposed: Seconds
    backward_exposed: Seconds
    offload: Seconds
    offload_exposed: Seconds
    weights: RankWeights

    @property
    def total(self) -> Seconds:
        """All phases, nothing recomputed in full."""
        return self.forward + self.backward_input + self.backward_weight


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCosts:
    """Costs of a table of layouts, before layers are split over stages.

    Attributes:
        priced: Blocks by cause, one row per distinct shard.
        shard_of_row: Which of those rows a layout uses.
        hops: Seconds of handing a micro-batch from rank to rank of the pipeline.
        states: Seconds per weight and step.

    """

    embedding: BlockTimes
    layers: tuple[tuple[LayerKind, BlockTimes], ...]
    head: BlockTimes
    priced: WorkloadCosts
    shard_of_row: NDArray[np.int64]
    hops: Hops
    states: StateCosts
    rates: Rates
    placement: Placement

    def take(self, rows: NDArray[np.int64]) -> "LayoutCosts":
        """Return the costs of some layouts."""
        by_row: dict[str, Any] = {
            name: take_rows(getattr(self, name), rows, len(self.shard_of_row))
            for name in ("embedding", "layers", "head", "hops", "states", "placement")
        }
        num_shards = self.priced.head.exposed.shape[-1]
        priced = take_rows(self.priced, self.shard_of_row[rows], num_shards)
        return replace(self, **by_row, priced=priced, shard_of_row=np.arange(len(rows)))


def layout_costs(
    model: ModelSpec,
    job: TrainingJob,
    cluster: Cluster,
    table: LayoutTable,
    recompute_modules: tuple[str, ...] = (),
) -> LayoutCosts:
    """Price the blocks of every layout of a table.

    Args:
        model: The network.
        job: What is trained.
        cluster: The machine.
        table: Layouts.
        recompute_modules: What selective recomputation runs again; the target's habit when empty.

    Raises:
        ValueError: The device does not compute in the job's precision.

    """
    rates, placement = rates_of(job, cluster.profile), place(table, cluster)
    first, shard_of_row = _distinct_shards(table, placement)
    shard = shards_of(table.take(first), job)
    pricing = Pricing(
        rates=rates,
        overlap=overlap_of(job),
        placement=take_rows(placement, first, len(table)),
        shard=shard,
        num_rows=len(first),
        recompute_modules=module_shares(job, recompute_modules),
        stops_early=job.target is Target.NATIVE,
    )
    priced = price_workload(build_workload(model, _as_on(job, cluster), shard), pricing)

    def times(
        costs: BlockCosts, weights: RankWeights, to_host: Seconds | None = None
    ) -> BlockTimes:
        gathers = block_gathers(weights, job, table, placement, rates)
        total = costs.total[:, shard_of_row]
        return _block_times(total, weights, gathers, table, rates, to_host=to_host)

    layers = [layer_weights(model, job, kind, table) for kind, _ in priced.layers]
    moved = [
        seconds_to_host(model, job, kind, table, rates, modules=recompute_modules)
        for kind, _ in priced.layers
    ]
    return LayoutCosts(
        embedding=times(priced.embedding, embedding_weights(model, job, table)),
        layers=tuple(
            (kind, times(costs, weights, to_host))
            for (kind, costs), weights, to_host in zip(priced.layers, layers, moved, strict=True)
        ),
        head=times(priced.head, head_weights(model, job, table)),
        priced=priced,
        shard_of_row=shard_of_row,
        hops=pipeline_hops(model, job, table, placement, rates),
        states=state_costs(job, table, placement, rates, layers),
        rates=rates,
        placement=placement,
    )


def _as_on(job: TrainingJob, cluster: Cluster) -> TrainingJob:
    """Return the job as a cluster runs it: processors have no fused norm."""
    if cluster.profile.generation != "cpu":
        return job
    return replace(job, switches=replace(job.switches, fused_norm=False))


def _distinct_shards(
    table: LayoutTable, placement: Placement
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first row of each distinct shard, and the shard of each row."""
    columns = (
        table.tensor_parallel,
        table.context_parallel,
        table.expert_parallel,
        table.expert_tensor_parallel,
        table.micro_batch_size,
        table.sequence_parallel,
        table.context_parallel_type,
        placement.tensor.inner,
        placement.context.inner,
        placement.expert.inner,
        placement.expert_tensor.inner,
    )
    key = np.zeros(len(table), dtype=np.int64)
    for column in columns:
        key = key * (int(column.max(initial=0)) + 1) + column
    _, first, shard_of_row = np.unique(key, return_index=True, return_inverse=True)
    return first, shard_of_row


def _block_times(
    total: Seconds,
    weights: RankWeights,
    gathers: BlockGathers,
    table: LayoutTable,
    rates: Rates,
    *,
    to_host: Seconds | None,
) -> BlockTimes:
    """Combine a block's local seconds with what ZeRO-3 and offloading move beside them.

    Copies to the host and back take no multiprocessor: they cost what outlasts the block.
    """
    selective = np.where(table.recompute == SELECTIVE_CODE, total[SELECTIVE], 0.0)
    forward, to_weight = total[FORWARD], total[BACKWARD_WEIGHT]
    to_input = total[BACKWARD_INPUT] + selective
    # Weights that are kept come beside the first micro-batch's forward: the others hide nothing.
    spread = np.where(table.keep_gathered == 1, table.num_micro_batches, 1)
    gather_exposed = exposed_seconds(gathers.forward * spread, forward, rates) / spread
    backward = to_input + to_weight
    beside_backward = gathers.backward + gathers.reduce
    exposed = exposed_seconds(beside_backward, backward, rates)
    again = backward + total[RECOMPUTE]
    exposed_again = exposed_seconds(beside_backward, again, rates)
    if to_host is None:
        to_host = np.zeros(len(table))
    leaving = np.maximum(to_host - (forward + gather_exposed), 0.0)
    coming = np.maximum(to_host - (backward + exposed), 0.0)
    return BlockTimes(
        forward=forward + gather_exposed + leaving,
        backward_input=to_input + exposed + coming,
        backward_weight=to_weight,
        recompute=total[RECOMPUTE] + exposed_again - exposed,
        gathers=gathers,
        gather_exposed=gather_exposed,
        backward_exposed=exposed,
        offload=2.0 * to_host,
        offload_exposed=leaving + coming,
        weights=weights,
    )


def rank_state_seconds(
    states: StateCosts, weights: RankWeights
) -> tuple[Seconds, Seconds, Seconds]:
    """Return reduce, gather and update seconds per step of one block's weights."""
    trained = weights.dense * weights.trained, weights.experts * weights.trained
    parts = states.reduce, states.gather, states.update
    reduce, gather, update = (dense * trained[0] + experts * trained[1] for dense, experts in parts)
    return reduce, gather, update
