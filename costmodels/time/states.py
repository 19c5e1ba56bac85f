"""Seconds of keeping states in step: gradient reduction, parameter gathers, optimizer.

    ZeRO-0      all-reduce of gradients once per step
    ZeRO-1, 2   reduce-scatter of gradients and all-gather of weights once per step; under ZeRO-2
                native and DeepSpeed reduce after each micro-batch
    ZeRO-3      all-gather of each block's weights before its forward and its backward, and
                reduce-scatter of its gradients after, per micro-batch; weights that are kept are
                gathered once per step
    HSDP        the above inside a group, then an all-reduce of the shard across groups

Dense weights live on data x context ranks, experts on the ranks that hold the same experts. Large
transfers go in buckets, so seconds are in proportion to weights: what a rank pays is the sum over
its blocks, whichever blocks those are.

Source: ZeRO, arXiv:1910.02054, sections 5 and 7; FSDP, arXiv:2304.11277, section 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodels.compiled import step
from costmodels.job import Optimizer, Target, TrainingJob
from costmodels.layout_table import LayoutTable
from costmodels.memory.states import ZERO_2, ZERO_3
from costmodels.memory.weight_bytes import bytes_per_weight, reduced_bytes
from costmodels.targets import BEHAVIOURS
from costmodels.time.collectives import collective_seconds
from costmodels.time.overlap import overlap_of
from costmodels.time.placement import Placement, Tiers
from costmodels.time.rank_weights import RankWeights
from costmodels.time.rates import Rates
from costmodels.units import MIB

Seconds = NDArray[np.float64]

# Bytes per weight that the optimizer reads and writes: gradient, master, moments in; master,
# moments and working weight out; and once more over gradients for their norm and for zeroing.
_UPDATE_BYTES = {
    Optimizer.ADAMW: 30 + 8,
    Optimizer.ADAMW_BF16: 14 + 4,
    Optimizer.ADAMW_8BIT: 18 + 8,
    Optimizer.SGD: 6 + 8,
}
# Values of one bucket of gradients, or of gathered weights. Kind: chosen, by the targets' defaults:
# Megatron Core's bucket_size (max(40e6, 1e6 per data-parallel rank)), DeepSpeed's
# reduce_bucket_size; native moves a layer at a time. torch's DDP has 25 MiB, of fp32 here.
_MEGATRON_VALUES, _MEGATRON_VALUES_PER_RANK = 40e6, 1e6
_DEEPSPEED_VALUES = 500e6
_DDP_VALUES = 25 * MIB / 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Groups:
    """Ranks that a state is cut over, copies of a shard, and both together."""

    zero: Tiers
    replica: Tiers
    everyone: Tiers


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGathers:
    """ZeRO-3's seconds in one block and micro-batch; nothing for other stages.

    Attributes:
        forward: Gathering weights for the forward; a share of it where they are kept for others.
        backward: The same for the backward.
        reduce: Reducing gradients.

    """

    forward: Seconds
    backward: Seconds
    reduce: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCosts:
    """Seconds per weight and step of one row's groups, dense weights and experts apart.

    Attributes:
        reduce: Gradients, stages 0 to 2.
        gather: Updated weights, stages 1 and 2.
        update: The optimizer.

    """

    reduce: tuple[Seconds, Seconds]
    gather: tuple[Seconds, Seconds]
    update: tuple[Seconds, Seconds]


def state_costs(
    job: TrainingJob,
    table: LayoutTable,
    placement: Placement,
    rates: Rates,
    layers: Sequence[RankWeights],
) -> StateCosts:
    """Return the seconds per weight of reducing, gathering and updating.

    Args:
        job: Optimizer, precision and target.
        table: ZeRO stages, groups and offload.
        placement: Where the groups lie.
        rates: Links and memory.
        layers: Weights of one layer of each kind.

    """
    per_weight = bytes_per_weight(job)
    reduce, gather, update = [], [], []
    largest = np.maximum.reduce([layer.dense + layer.experts for layer in layers])
    values = _bucket_values(job.target, largest, placement)
    for groups in _dense_and_experts(placement):
        once = (table.zero_stage >= 1) & (table.zero_stage < ZERO_3)
        gathered = _per_byte("all_gather", groups.zero, rates, values * per_weight.working)
        gathered = gathered * per_weight.working
        reduce.append(_reduce_per_weight(reduced_bytes(job), groups, table, rates, values))
        gather.append(np.where(once, gathered, 0.0))
        update.append(_update_per_weight(job, table, groups.zero, rates))
    repeats = _reductions_per_step(job, table)
    return StateCosts(
        reduce=(reduce[0] * repeats, reduce[1] * repeats),
        gather=(gather[0], gather[1]),
        update=(update[0], update[1]),
    )


def _dense_and_experts(placement: Placement) -> tuple[_Groups, _Groups]:
    """Return the groups of dense weights and those of experts (cut over all that share them)."""
    experts = placement.expert_data
    alone = Tiers(inner=np.ones_like(experts.inner), outer=np.ones_like(experts.outer))
    return (
        _Groups(zero=placement.zero, replica=placement.replica, everyone=placement.data),
        _Groups(zero=experts, replica=alone, everyone=experts),
    )


def _bucket_values(target: Target, layer: Seconds, placement: Placement) -> Seconds:
    """Return how many values of the full tensor a collective of stages 0 to 2 moves at once."""
    if target is Target.NATIVE:
        return layer
    if target is Target.MEGATRON:
        values: Seconds = np.maximum(
            _MEGATRON_VALUES, _MEGATRON_VALUES_PER_RANK * placement.data.ranks
        )
        return values
    each = _DEEPSPEED_VALUES if target is Target.DEEPSPEED else _DDP_VALUES
    return np.full(len(layer), each)


def _per_byte(kind: str, tiers: Tiers, rates: Rates, payload: Seconds) -> Seconds:
    """Return seconds per byte of the full tensor, in buckets of a payload."""
    seconds: Seconds = np.asarray(collective_seconds(kind, payload, tiers, rates))
    return seconds / payload


def _start_seconds(tiers: Tiers, rates: Rates) -> Seconds:
    """Return what one more collective of a group costs, however small: its latency."""
    seconds: Seconds = np.asarray(collective_seconds("all_gather", 1.0, tiers, rates))
    return seconds


def _reduce_per_weight(
    gradient_bytes: int, groups: _Groups, table: LayoutTable, rates: Rates, values: Seconds
) -> Seconds:
    """Return the seconds of reducing one weight's gradient once, stages 0 to 2."""
    payload, cut = values * gradient_bytes, groups.zero.ranks
    whole = _per_byte("all_reduce", groups.everyone, rates, payload)
    scattered = _per_byte("reduce_scatter", groups.zero, rates, payload)
    across = _per_byte("all_reduce", groups.replica, rates, payload / cut) / cut
    seconds = np.where(table.zero_stage == 0, whole, scattered + across)
    return gradient_bytes * np.where(table.zero_stage == ZERO_3, 0.0, seconds)


def _reductions_per_step(job: TrainingJob, table: LayoutTable) -> Seconds:
    """Return how often gradients are reduced: DeepSpeed's ZeRO-2 does so per micro-batch."""
    each = overlap_of(job).reduces_each_micro_batch & (table.zero_stage == ZERO_2)
    return np.where(each, table.num_micro_batches, 1).astype(np.float64)


def _update_per_weight(
    job: TrainingJob, table: LayoutTable, shards: Tiers, rates: Rates
) -> Seconds:
    """Return the seconds of updating one weight, on the device or on the host."""
    own: Seconds = np.where(table.zero_stage >= 1, 1.0 / shards.ranks, 1.0)
    moved = _UPDATE_BYTES[job.optimizer]
    on_device = step.device_update(
        weights=own,
        update_bytes=moved,
        memory_bandwidth=rates.memory_bandwidth,
        memory_efficiency=rates.memory_efficiency,
    ).seconds
    per_weight = bytes_per_weight(job)
    on_host = step.host_update(
        weights=own,
        update_bytes=moved,
        transfer_bytes=per_weight.gradient + per_weight.working,
        host_bandwidth=rates.host_bandwidth,
        host_update_rate=rates.host_update_rate,
    ).seconds
    offloaded = (table.offload_optimizer | table.offload_parameters).astype(bool)
    seconds: Seconds = np.where(offloaded, np.asarray(on_host), np.asarray(on_device))
    return seconds


def block_gathers(
    weights: RankWeights, job: TrainingJob, table: LayoutTable, placement: Placement, rates: Rates
) -> BlockGathers:
    """Return what ZeRO-3 moves for a block.

    Offloaded weights come from the host first. Where weights are kept they come once per step;
    targets that keep them in a pipeline reduce once per step, too.
    """
    per_weight = bytes_per_weight(job)
    working = 1.0 if job.switches.fp8_all_gather else float(per_weight.working)
    gather, reduce = np.zeros(len(table)), np.zeros(len(table))
    counts = weights.dense, weights.experts
    calls = overlap_of(job).gathers_each_tensor * np.maximum(weights.expert_tensors - 1, 0)
    one_more = calls * _start_seconds(placement.expert_data, rates)
    gather, reduce = gather + one_more, reduce + one_more * (weights.trained > 0)
    for count, groups in zip(counts, _dense_and_experts(placement), strict=True):
        shards = groups.zero.ranks
        gather = gather + collective_seconds("all_gather", count * working, groups.zero, rates)
        gradients = count * weights.trained * reduced_bytes(job)
        reduce = reduce + collective_seconds("reduce_scatter", gradients, groups.zero, rates)
        across = collective_seconds("all_reduce", gradients / shards, groups.replica, rates)
        reduce = reduce + across
        from_host = count * working / shards / rates.host_bandwidth
        gather = gather + np.where(table.offload_parameters.astype(bool), from_host, 0.0)
    keeps = BEHAVIOURS[job.target].keeps_gathered_in_pipeline & (table.pipeline_parallel > 1)
    cuts = table.zero_stage == ZERO_3
    once = np.where(keeps, 1.0 / table.num_micro_batches, 1.0) * cuts
    kept = table.keep_gathered == 1
    return BlockGathers(
        forward=gather * np.where(kept, cuts / table.num_micro_batches, once),
        backward=gather * np.where(kept, 0.0, once),
        reduce=reduce * once,
    )
