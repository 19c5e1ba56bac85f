"""What one rank executes in a step, in whole numbers: FLOPs, and bytes that each axis carries.

Conventions (those of `planner verify`):

    FLOPs     2 m n k of each matrix product, its two gradients the same each; attention as the
              kernel runs it: half of the square where causal, two products forward and five
              backward; recomputation counts
    bytes     the whole tensor of an all-gather (output), reduce-scatter (input) or all-reduce,
              what is sent of an all-to-all or a transfer; single numbers do not count

Counted from the same ops that the time model prices, in exact integers. What travels to keep the
states in step is in `states`.
"""

from collections import Counter
from dataclasses import dataclass

from costmodels.counts.buckets import layers_of_stage
from costmodels.counts.states import state_bytes
from costmodels.job import Precision, TrainingJob
from costmodels.layout import Layout, Recompute
from costmodels.model import ModelSpec
from costmodels.network.ops import Attention, Block, Collective, Gemm, skipped_by_recompute
from costmodels.network.shard import Shard, shard_of
from costmodels.network.workload import Workload, build_workload


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
        own = layers_of_stage(model, layout, stage)
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
    total += state_bytes(model, job, layout, rank)
    return RankCounts(
        flops=layout.num_micro_batches * flops,
        num_bytes=tuple(sorted((axis, size) for axis, size in total.items() if size)),
    )


def _is_full(layout: Layout) -> bool:
    return layout.recompute is Recompute.FULL


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
    skipped = skipped_by_recompute(block)
    once, again, within = Counter[str](), Counter[str](), Counter[str]()
    for op in block.ops:
        if isinstance(op, Gemm):
            product = 2 * op.m * op.n * op.k * op.count
            forward += product
            again_flops += product if op.name not in skipped else 0
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
            again[op.axis] += ahead if op.name not in skipped else 0
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
