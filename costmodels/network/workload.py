"""Workload: the blocks of a network (embedding, layers by kind, head) as ops in their order.

    embedding   look up, position, reduce over vocabulary shards
    layer       norm - attention - residual - norm - feed-forward (or experts) - residual
    head        norm - logits - loss

Shapes are those of one rank under a Shard: heads, feed-forward width and vocabulary divided by the
tensor axis, tokens by the context axis (and, between the tensor-parallel regions, by the tensor
axis with sequence parallelism), experts by the expert axes. Each tensor-parallel region starts with
a column-parallel product and ends with a row-parallel one:

    without sequence parallelism   forward: all-reduce at the end;  backward: at the start
    with sequence parallelism      all-gather at the start, reduce-scatter at the end, and mirrored

Sources: Shoeybi et al., arXiv:1909.08053, section 3; Korthikanti et al., arXiv:2205.05198,
section 4.2. Bytes of element-wise ops: counted from what each kernel reads and writes. Ops state
those of 16-bit activations; fp32 jobs have twice as many.
"""

import math
from dataclasses import dataclass

from costmodels.job import Precision, TrainingJob
from costmodels.model import LayerKind, ModelSpec
from costmodels.network.attention import attention_ops
from costmodels.network.feed_forward import dense_ops, expert_ops, shared_gate_ops
from costmodels.network.ops import (
    FULL,
    HALF,
    Block,
    Collective,
    Gemm,
    MemoryPass,
    Op,
    Size,
    widened,
)
from costmodels.network.shard import Shard, padded_rows, per_rank
from costmodels.network.stream import enter_region, leave_region, norm, residual, sum_branches
from costmodels.targets import BEHAVIOURS, fuses_loss, works_on_whole_logits

# Bytes per logit of the loss, forward and backward. In chunks: read the logits once, write their
# gradient in place. Unfused: cast to fp32, maximum, shift, exponential, sum, gather, then scale
# and cast back. Kind: chosen.
_CHUNKED_LOSS_BYTES = (8, 6)
_UNFUSED_LOSS_BYTES = (34, 14)
_LOSS_KERNELS = {True: (2, 1), False: (10, 4)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The blocks of a network under a shard.

    Attributes:
        layers: One block per kind of layer, in order of first appearance.

    """

    embedding: Block
    layers: tuple[tuple[LayerKind, Block], ...]
    head: Block

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Every distinct block: embedding, kinds of layers, head."""
        return (self.embedding, *(block for _, block in self.layers), self.head)


def build_workload(model: ModelSpec, job: TrainingJob, shard: Shard) -> Workload:
    """Return the blocks of a network as one rank sees them.

    Args:
        model: The network.
        job: Sequence length, precision, kernels.
        shard: The rank's share, for one layout or for a table of them.

    """
    kinds = tuple(dict.fromkeys(model.layer_kinds))
    return Workload(
        embedding=_in_precision(job, _embedding(model, job, shard)),
        layers=tuple((kind, _in_precision(job, _layer(model, job, kind, shard))) for kind in kinds),
        head=_in_precision(job, _head(model, job, shard)),
    )


def _in_precision(job: TrainingJob, block: Block) -> Block:
    if job.precision is not Precision.FP32:
        return block
    return Block(name=block.name, ops=tuple(widened(op) for op in block.ops))


def _projections(model: ModelSpec) -> int:
    """Return how many products of an attention block read the normalised stream."""
    return 1 if model.latent_attention or model.architecture == "gpt2" else 3


def _layer(model: ModelSpec, job: TrainingJob, kind: LayerKind, shard: Shard) -> Block:
    hidden, outer = model.hidden_size, shard.outer_tokens
    elements = outer * hidden
    norms = [norm(job, f"norm_{i}", elements) for i in range(model.norms_per_layer)]
    before_ffn = norms[1:2] if not model.parallel_block else []
    moe = model.moe if kind.has_experts else None
    ops: list[Op] = [
        norms[0],
        enter_region(shard, "attention_enter", *_attention_input(model)),
        *sum_branches(job, shard, "attention_branches", hidden, _projections(model)),
        *attention_ops(model, job, kind, shard),
        leave_region(shard, "attention_leave", hidden, "attention_output"),
        residual("attention_residual", elements),
        *before_ffn,
    ]
    if moe is not None:
        ops += expert_ops(model, moe, job, shard)
    width = moe.shared_ffn_hidden_size if moe is not None else model.ffn_hidden_size
    inputs = 2 if model.gated_ffn else 1
    apart = inputs if job.switches.separate_gates else 1
    if width:
        ops += [
            enter_region(shard, "ffn_enter", hidden, "ffn_in", reductions=apart),
            *sum_branches(job, shard, "ffn_branches", hidden, inputs),
            *dense_ops(model, job, shard, width),
            leave_region(shard, "ffn_leave", hidden, "ffn_out"),
        ]
    if moe is not None and moe.shared_gate:
        ops += shared_gate_ops(model, shard)
    if model.whole_matrices:
        ops.append(_whole_matrices(model, shard))
    rest = norms[1:] if model.parallel_block else norms[2:]
    ops += [*rest, residual("ffn_residual", elements)]
    return Block(name="layer", ops=tuple(_with_adapters(job, ops)))


def _whole_matrices(model: ModelSpec, shard: Shard) -> Gemm:
    """Multiply by what no rule cuts: between the parallel regions, in one product of that size.

    Only how many weights there are is known. Most such matrices read or write the hidden state, or
    one cut into equal parts; a shorter inner dimension would price the filling of tiles alone.
    """
    k = math.gcd(model.whole_matrices, model.hidden_size)
    return Gemm(
        name="whole_matrices", module="mlp", m=shard.outer_tokens, n=model.whole_matrices // k, k=k
    )


def _attention_input(model: ModelSpec) -> tuple[int, str]:
    """Return the width of what attention's cut products read, and one of them.

    With latent attention these read compressed forms and the rotary key, which every rank makes of
    its own tokens; queries that are not compressed read the hidden state.
    """
    latent = model.latent_attention
    if latent is None:
        return model.hidden_size, "attention_qkv"
    query = latent.q_lora_rank or model.hidden_size
    return query + latent.kv_lora_rank + latent.qk_rope_head_dim, "latent_key_value_up"


def _with_adapters(job: TrainingJob, ops: list[Op]) -> list[Op]:
    """Put low-rank adapters beside each weight: two thin products that train."""
    rank = job.lora_rank
    if rank is None:
        return ops
    adapted: list[Op] = []
    for op in ops:
        adapted.append(op)
        if isinstance(op, Gemm) and op.weight and op.name != "router":
            thin = {"module": op.module, "m": op.m, "count": op.count, "quantised": False}
            adapted += [
                Gemm(name=f"{op.name}_lora_a", n=rank, k=op.k, **thin),
                Gemm(name=f"{op.name}_lora_b", n=op.n, k=rank, **thin),
            ]
    return adapted


def _embedding(model: ModelSpec, job: TrainingJob, shard: Shard) -> Block:
    hidden = model.hidden_size
    rows = per_rank(padded_rows(model, job.target, shard.tensor_parallel), shard.tensor_parallel)
    elements = shard.tokens * hidden
    trained = job.lora_rank is None
    ops: list[Op] = [
        MemoryPass(  # backward writes, and adds to the gradient, all rows of the table
            name="look_up",
            module="embedding",
            forward=2 * HALF * elements,
            backward=(2 * HALF * elements + 12 * rows * hidden) if trained else 0,
            forward_kernels=2,
            backward_kernels=3,
        ),
        leave_region(shard, "embedding_leave", hidden, ""),
    ]
    if model.num_position_embeddings:
        ops.append(residual("positions", shard.outer_tokens * hidden))
    if model.embedding_norm:
        ops.append(norm(job, "embedding_norm", shard.outer_tokens * hidden))
    return Block(name="embedding", ops=tuple(ops))


def _head(model: ModelSpec, job: TrainingJob, shard: Shard) -> Block:
    rows = per_rank(padded_rows(model, job.target, shard.tensor_parallel), shard.tensor_parallel)
    fused = fuses_loss(job) or job.chunked_loss
    forward, backward = _loss_bytes(job)
    forward_kernels, backward_kernels = _LOSS_KERNELS[fused]
    whole = works_on_whole_logits(job)
    scored = shard.tokens * (rows * shard.tensor_parallel if whole else rows)
    return Block(
        name="head",
        ops=(
            norm(job, "final_norm", shard.outer_tokens * model.hidden_size),
            enter_region(shard, "head_enter", model.hidden_size, "logits"),
            Gemm(
                name="logits",
                module="head",
                m=shard.tokens,
                n=rows,
                k=model.hidden_size,
                trained=job.lora_rank is None,
                quantised=False,
            ),
            MemoryPass(
                name="loss",
                module="head",
                forward=forward * scored,
                backward=backward * scored,
                forward_kernels=forward_kernels,
                backward_kernels=backward_kernels,
                cause="loss",
            ),
            _logits_gather(scored) if whole else _loss_reduce(shard),
        ),
    )


def _loss_bytes(job: TrainingJob) -> tuple[int, int]:
    """Return bytes per logit that the loss moves, forward and backward."""
    if job.chunked_loss:
        return _CHUNKED_LOSS_BYTES
    return BEHAVIOURS[job.target].fused_loss_bytes if fuses_loss(job) else _UNFUSED_LOSS_BYTES


def _logits_gather(scored: Size) -> Collective:
    """Bring all logits to every rank; each keeps its own part of their gradient."""
    return Collective(
        name="logits_gather",
        module="head",
        axis="tp",
        group="tensor",
        forward="all_gather",
        backward="",
        payload=HALF * scored,
    )


def _loss_reduce(shard: Shard) -> Collective:
    """Exchange maximum, target's logit and sum of exponentials: three numbers per token."""
    return Collective(
        name="loss_reduce",
        module="head",
        axis="tp",
        group="tensor",
        forward="all_reduce",
        backward="",
        payload=3 * FULL * shard.tokens,
        follows_precision=False,
    )
