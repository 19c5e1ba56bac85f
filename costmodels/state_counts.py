"""Bytes that travel in a step to keep a rank's states in step, in whole numbers.

How they travel follows the native runtime: gradients once per step under ZeRO-0 and 1, after each
backward under ZeRO-2 and 3; ZeRO-3 gathers each block for its forward and for its backward, or once
where it is kept. Conventions are those of `counts`.
"""

from collections import Counter
from dataclasses import dataclass

from costmodels.job import TrainingJob
from costmodels.layout import Layout
from costmodels.model import LayerKind, ModelSpec
from costmodels.parameters import head_parameters, layer_parameters
from costmodels.shard import padded_rows
from costmodels.states import ZERO_2, ZERO_3, BytesPerWeight, bytes_per_weight


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """Local weights of a rank.

    Attributes:
        dense: All of them.
        tensor_copies: Those whose gradients are summed over the tensor axis.
        tied: Of a table that another pipeline rank holds too; gradients are summed with it.
        gathered_twice: Of a table that embeds and makes logits on this rank; ZeRO-3 gathers it
            (and what shares its bucket) for each.
        experts: Of routed experts, which fewer ranks hold; not in `dense`.

    """

    dense: int
    tensor_copies: int
    tied: int
    gathered_twice: int
    experts: int


def state_bytes(model: ModelSpec, job: TrainingJob, layout: Layout, rank: int) -> Counter[str]:
    """Count gradients and weights that travel to keep the states of a rank in step, by axis.

    Args:
        model: The network.
        job: What is trained per step.
        layout: How it is spread.
        rank: Position along the pipeline.

    """
    weights = _rank_weights(model, job, layout, rank)
    per_weight = bytes_per_weight(job)
    ways = layout.data_parallel * layout.context_parallel
    sharded = layout.zero_stage > 0 and layout.zero_group > 1
    cut = layout.zero_group if sharded else 1
    per_pass = layout.num_micro_batches if sharded and layout.zero_stage >= ZERO_2 else 1
    total = Counter[str]()
    if ways > 1:
        total["dp"] += weights.dense * per_weight.gradient * per_pass
    if sharded:
        if ways > layout.zero_group:
            total["dp"] += weights.dense // cut * per_weight.gradient
        gathers = _gathers_per_step(layout)
        twice = weights.gathered_twice if gathers > 1 else 0
        total["dp"] += (weights.dense + twice) * per_weight.working * gathers
    total["dp"] += _expert_state_bytes(weights.experts, per_weight, layout)
    if layout.tensor_parallel > 1:
        total["tp"] += weights.tensor_copies // cut * per_weight.gradient
    total["pp"] += weights.tied // cut * per_weight.gradient
    return total


def layers_of_stage(model: ModelSpec, layout: Layout, stage: int) -> tuple[LayerKind, ...]:
    """Return the kinds of a global stage's layers, in order."""
    first = sum(layout.layers_per_stage[:stage])
    return model.layer_kinds[first : first + layout.layers_per_stage[stage]]


def _gathers_per_step(layout: Layout) -> int:
    regathers = layout.zero_stage == ZERO_3 and not layout.keep_gathered
    return 2 * layout.num_micro_batches if regathers else 1


def _expert_state_bytes(weights: int, per_weight: BytesPerWeight, layout: Layout) -> int:
    """Count the same of a rank's experts, over the ranks that hold the same ones."""
    shards = layout.expert_parallel * layout.expert_tensor_parallel
    dense_ways = layout.data_parallel * layout.context_parallel
    ways = dense_ways * layout.tensor_parallel // shards
    group = max(layout.zero_group * layout.tensor_parallel // shards, 1)
    sharded = layout.zero_stage > 0 and group > 1
    per_pass = layout.num_micro_batches if sharded and layout.zero_stage >= ZERO_2 else 1
    total = weights * per_weight.gradient * per_pass if ways > 1 else 0
    if sharded:
        if ways > group:
            total += weights // group * per_weight.gradient
        total += weights * per_weight.working * _gathers_per_step(layout)
    return total


def _rank_weights(model: ModelSpec, job: TrainingJob, layout: Layout, rank: int) -> _Weights:
    """Return the weights of a rank.

    Copies over the tensor axis see other data under sequence parallelism (other tokens), norms of
    single heads always (other heads), so their gradients are summed.
    """
    tp = layout.tensor_parallel
    dense = copies = tied = twice = experts = 0
    expert_shards = layout.expert_parallel * layout.expert_tensor_parallel
    of_heads = 2 * model.head_dim if model.qk_norm == "per-head" else 0
    for stage in layout.stages_of_rank(rank):
        for kind in layers_of_stage(model, layout, stage):
            weights = layer_parameters(model, kind)
            cut = weights.query_and_output_matrices + weights.ffn_matrices
            shared = weights.replicated_vectors + weights.latent_matrices + weights.router
            key_value = weights.key_value_matrices // min(tp, model.num_kv_heads)
            dense += (cut + weights.sharded_vectors) // tp + key_value + shared
            experts += weights.expert_parameters // expert_shards
            routes = (
                model.hidden_size * model.moe.num_experts if model.moe and weights.router else 0
            )
            copies += shared if layout.sequence_parallel else of_heads + routes
    rows = padded_rows(model, job.target, tp) // tp
    stages = layout.stages_of_rank(rank)
    first, last = 0 in stages, layout.num_stages - 1 in stages
    table = rows * model.hidden_size
    positions = model.num_position_embeddings * model.hidden_size
    if first:
        dense += table + positions
        copies += positions if layout.sequence_parallel else 0
    if last:
        head = 0 if model.tied_embeddings else model.vocab_size * model.hidden_size
        norm = head_parameters(model) - head
        dense += norm + (0 if model.tied_embeddings and first else table)
        copies += norm if layout.sequence_parallel else 0
    if model.tied_embeddings and first != last:
        tied = table
    elif model.tied_embeddings and first:
        twice = table + (positions if tp == 1 else 0)  # cut tables have buckets of their own
    return _Weights(
        dense=dense, tensor_copies=copies, tied=tied, gathered_twice=twice, experts=experts
    )
