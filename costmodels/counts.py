"""What one rank executes in a step, in whole numbers: FLOPs, and bytes that each axis carries.

Conventions (those of `planner verify`):

    FLOPs     2 m n k of each matrix product, its two gradients the same each; attention as the
              kernel runs it: half of the square where causal, two products forward and five
              backward; recomputation counts
    bytes     the whole tensor of an all-gather (output), reduce-scatter (input) or all-reduce,
              what is sent of an all-to-all or a transfer; single numbers do not count

Counted from the same ops that the time model prices, in exact integers. How states travel follows
the native runtime: gradients once per step under ZeRO-0 and 1, after each backward under ZeRO-2
and 3; ZeRO-3 gathers each block for its forward and for its backward, or once where it is kept.
"""

from collections import Counter
from dataclasses import dataclass

from costmodels.job import Precision, TrainingJob
from costmodels.layout import Layout, Recompute
from costmodels.model import LayerKind, ModelSpec
from costmodels.ops import Attention, Block, Collective, Gemm, not_made_again
from costmodels.parameters import head_parameters, layer_parameters
from costmodels.shard import Shard, padded_rows, shard_of
from costmodels.states import BytesPerWeight, bytes_per_weight
from costmodels.workload import Workload, build_workload

ZERO_2, ZERO_3 = 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCounts:
    """Executed work of one rank in one step.

    Attributes:
        flops: Forward, backward and recomputation.
        num_bytes: (axis, bytes) of the axes that carry anything, sorted: "tp", "cp", "dp", "ep"
            or "pp".

    """

    flops: int
    num_bytes: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockCounts:
    """One micro-batch of a block: forward and backward FLOPs, what runs again, bytes by axis.

    Selective recomputation runs attention again, and brings keys and values for it once more.
    """

    forward: int
    backward: int
    again: int
    selective: int
    bytes_once: Counter[str]
    bytes_again: Counter[str]
    bytes_selective: Counter[str]


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


def count_rank(model: ModelSpec, job: TrainingJob, layout: Layout, rank: int) -> RankCounts:
    """Count what a pipeline rank executes in one step.

    Args:
        model: The network.
        job: What is trained per step.
        layout: How it is spread.
        rank: Position along the pipeline; ranks of the other axes do the same.

    """
    shard = shard_of(layout, job)
    workload = build_workload(model, job, shard)
    blocks = {kind: _count_block(block, layout) for kind, block in workload.layers}
    ends = _end_blocks(workload, layout)
    flops, axes = 0, Counter[str]()
    for stage in layout.stages_of_rank(rank):
        own = _layers_of_stage(model, layout, stage)
        recomputed = own[: layout.recompute_layers or len(own)] if _is_full(layout) else ()
        for kind in own:
            once, extra = _work(blocks[kind], layout, again=False)
            flops, axes = flops + once, axes + extra
        for kind in recomputed:
            once, extra = _work(blocks[kind], layout, again=True)
            flops, axes = flops + once, axes + extra
        for place, block in ends:
            if place % layout.num_stages == stage:
                once, extra = _work(block, layout, again=False)
                flops, axes = flops + once, axes + extra
    total = Counter({axis: layout.num_micro_batches * size for axis, size in axes.items()})
    total += _pipeline_bytes(model, job, layout, shard, rank)
    total += _state_bytes(model, job, layout, rank)
    return RankCounts(
        flops=layout.num_micro_batches * flops,
        num_bytes=tuple(sorted((axis, size) for axis, size in total.items() if size)),
    )


def _is_full(layout: Layout) -> bool:
    return layout.recompute is Recompute.FULL


def _layers_of_stage(model: ModelSpec, layout: Layout, stage: int) -> tuple[LayerKind, ...]:
    first = sum(layout.layers_per_stage[:stage])
    return model.layer_kinds[first : first + layout.layers_per_stage[stage]]


def _end_blocks(workload: Workload, layout: Layout) -> tuple[tuple[int, _BlockCounts], ...]:
    return (
        (0, _count_block(workload.embedding, layout)),
        (-1, _count_block(workload.head, layout)),
    )


def _work(block: _BlockCounts, layout: Layout, *, again: bool) -> tuple[int, Counter[str]]:
    """Return FLOPs and bytes of one micro-batch, or what full recomputation adds to them."""
    if again:
        return block.again, block.bytes_again
    flops, axes = block.forward + block.backward, block.bytes_once
    if layout.recompute is Recompute.SELECTIVE:
        return flops + block.selective, axes + block.bytes_selective
    return flops, axes


def _count_block(block: Block, layout: Layout) -> _BlockCounts:
    forward = backward = selective = again_flops = 0
    unmade = not_made_again(block)
    once, again, within = Counter[str](), Counter[str](), Counter[str]()
    for op in block.ops:
        if isinstance(op, Gemm):
            product = 2 * op.m * op.n * op.k * op.count
            forward += product
            again_flops += product if op.name not in unmade else 0
            backward += product * (2 if op.trained or not op.weight else 1)
            selective += product if op.module == "core_attn" else 0
        elif isinstance(op, Attention):
            forward += op.flops
            again_flops += op.flops
            backward += op.flops * 5 // 2
            selective += op.flops
        elif isinstance(op, Collective) and _group_size(op, layout) > 1:
            ahead, back = _both_ways(op, layout)
            once[op.axis] += ahead + back
            again[op.axis] += ahead if op.name not in unmade else 0
            within[op.axis] += ahead if op.module == "core_attn" else 0
    return _BlockCounts(
        forward=forward,
        backward=backward,
        again=again_flops,
        selective=selective,
        bytes_once=once,
        bytes_again=again,
        bytes_selective=within,
    )


def _group_size(op: Collective, layout: Layout) -> int:
    sizes = {
        "tensor": layout.tensor_parallel,
        "context": layout.context_parallel,
        "expert": layout.expert_parallel,
        "expert_tensor": layout.expert_tensor_parallel,
    }
    return sizes[op.group]


def _both_ways(op: Collective, layout: Layout) -> tuple[int, int]:
    """Return the bytes of a collective in forward and in backward."""
    split = layout.sequence_parallel
    ahead = op.forward if split or op.plain_forward is None else op.plain_forward
    back = op.backward if split or op.plain_backward is None else op.plain_backward
    payload = op.payload
    if op.forward == "ring":
        steps = layout.context_parallel - 1
        return payload * steps, 2 * payload * steps
    times = 1 if split else op.plain_backward_count
    return payload * bool(ahead), payload * bool(back) * times


def _pipeline_bytes(
    model: ModelSpec, job: TrainingJob, layout: Layout, shard: Shard, rank: int
) -> Counter[str]:
    """Count activations sent forward and gradients sent back, to stages on other ranks."""
    element = 4 if job.precision is Precision.FP32 else 2
    size = element * shard.outer_tokens * model.hidden_size
    sends = 0
    for stage in layout.stages_of_rank(rank):
        for neighbour in (stage - 1, stage + 1):
            if 0 <= neighbour < layout.num_stages:
                sends += layout.rank_of_stage(neighbour) != rank
    return Counter({"pp": sends * size * layout.num_micro_batches})


def _state_bytes(model: ModelSpec, job: TrainingJob, layout: Layout, rank: int) -> Counter[str]:
    """Count gradients and weights that travel to keep the states of a rank in step."""
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
        for kind in _layers_of_stage(model, layout, stage):
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
