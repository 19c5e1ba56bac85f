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

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodels.collective_costs import collective_seconds
from costmodels.compiled import step
from costmodels.job import Optimizer, TrainingJob
from costmodels.layout_table import LayoutTable
from costmodels.model import LayerKind, ModelSpec
from costmodels.overlap import overlap_of
from costmodels.parameters import embedding_parameters, head_parameters, layer_parameters
from costmodels.placement import Placement, Tiers
from costmodels.rates import Rates
from costmodels.shard import padded_rows
from costmodels.states import ZERO_2, ZERO_3, bytes_per_weight, reduced_bytes
from costmodels.targets import BEHAVIOURS
from costmodels.units import MB

Seconds = NDArray[np.float64]

# Bytes per weight that the optimizer reads and writes: gradient, master, moments in; master,
# moments and working weight out; and once more over gradients for their norm and for zeroing.
_UPDATE_BYTES = {
    Optimizer.ADAMW: 30 + 8,
    Optimizer.ADAMW_BF16: 14 + 4,
    Optimizer.ADAMW_8BIT: 18 + 8,
    Optimizer.SGD: 6 + 8,
}
# Payload of one bucket where a target names none. Kind: chosen; Megatron-LM's default bucket is
# 40 M fp32 gradients, torch's DDP uses 25 MiB.
_BUCKET_BYTES = 160 * MB


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWeights:
    """Weights of one block on a rank that holds it, one entry per row.

    Attributes:
        dense: Cut over the tensor axis or whole; copied over data x context.
        experts: Routed experts of this rank.
        trained: Share of the weights that gets gradients (1 without adapters).
        expert_tensors: Matrices that the experts of this rank consist of.

    """

    dense: Seconds
    experts: Seconds
    trained: float = 1.0
    expert_tensors: Any = 0


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


def layer_weights(
    model: ModelSpec, job: TrainingJob, kind: LayerKind, table: LayoutTable
) -> RankWeights:
    """Return the weights of a layer of a kind on one rank."""
    weights = layer_parameters(model, kind)
    tp = table.tensor_parallel
    cut = weights.query_and_output_matrices + weights.ffn_matrices + weights.sharded_vectors
    whole = weights.latent_matrices + weights.router + weights.replicated_vectors
    key_value = weights.key_value_matrices / np.minimum(tp, model.num_kv_heads)
    experts = weights.expert_parameters / (table.expert_parallel * table.expert_tensor_parallel)
    rank = job.lora_rank
    # Adapters of rank r beside an n x k weight train r (n + k) of its n k weights.
    share = 1.0 if rank is None else min(1.0, 2 * rank / model.hidden_size)
    num_experts = model.moe.num_experts if model.moe is not None and kind.has_experts else 0
    matrices = (3 if model.gated_ffn else 2) * num_experts
    return RankWeights(
        dense=cut / tp + key_value + whole,
        experts=experts,
        trained=share,
        expert_tensors=matrices // table.expert_parallel,
    )


def embedding_weights(model: ModelSpec, job: TrainingJob, table: LayoutTable) -> RankWeights:
    """Return the weights before the first layer on one rank."""
    rows = padded_rows(model, job.target, table.tensor_parallel)
    rest = embedding_parameters(model) - model.vocab_size * model.hidden_size
    return RankWeights(
        dense=rows * model.hidden_size / table.tensor_parallel + rest,
        experts=np.zeros(len(table)),
        trained=float(job.lora_rank is None),
    )


def head_weights(model: ModelSpec, job: TrainingJob, table: LayoutTable) -> RankWeights:
    """Return the weights after the last layer; a tied head is its own only across a pipeline."""
    rows = padded_rows(model, job.target, table.tensor_parallel)
    matrix = rows * model.hidden_size / table.tensor_parallel
    own = np.where(table.pipeline_parallel > 1, matrix, 0.0) if model.tied_embeddings else matrix
    norm = head_parameters(model) - (
        0 if model.tied_embeddings else model.vocab_size * model.hidden_size
    )
    return RankWeights(
        dense=own + norm, experts=np.zeros(len(table)), trained=float(job.lora_rank is None)
    )


def state_costs(
    job: TrainingJob, table: LayoutTable, placement: Placement, rates: Rates
) -> StateCosts:
    """Return the seconds per weight of reducing, gathering and updating.

    Args:
        job: Optimizer, precision and target.
        table: ZeRO stages, groups and offload.
        placement: Where the groups lie.
        rates: Links and memory.

    """
    per_weight = bytes_per_weight(job)
    reduce, gather, update = [], [], []
    for groups in _dense_and_experts(placement):
        once = (table.zero_stage >= 1) & (table.zero_stage < ZERO_3)
        gathered = _per_byte("all_gather", groups.zero, rates) * per_weight.working
        reduce.append(_reduce_per_weight(reduced_bytes(job), groups, table, rates))
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


def _per_byte(kind: str, tiers: Tiers, rates: Rates) -> Seconds:
    """Return seconds per byte of the full tensor, in buckets."""
    seconds: Seconds = np.asarray(collective_seconds(kind, float(_BUCKET_BYTES), tiers, rates))
    return seconds / _BUCKET_BYTES


def _start_seconds(tiers: Tiers, rates: Rates) -> Seconds:
    """Return what one more collective of a group costs, however small: its latency."""
    seconds: Seconds = np.asarray(collective_seconds("all_gather", 1.0, tiers, rates))
    return seconds


def _reduce_per_weight(
    gradient_bytes: int, groups: _Groups, table: LayoutTable, rates: Rates
) -> Seconds:
    """Return the seconds of reducing one weight's gradient once, stages 0 to 2."""
    whole = _per_byte("all_reduce", groups.everyone, rates)
    scattered = _per_byte("reduce_scatter", groups.zero, rates)
    across = _per_byte("all_reduce", groups.replica, rates) / groups.zero.ranks
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
