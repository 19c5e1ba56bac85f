"""Ops of an attention block: projections, position, scores, and how the context axis joins them.

Multi-head, grouped-query and latent attention differ in their projections; the core is the same.
A causal kernel does half the square; a window of w tokens leaves w - w^2 / (2 S) keys on average.

Sources: flash attention: arXiv:2205.14135, 2307.08691. Grouped queries: arXiv:2305.13245. Latent
attention: arXiv:2405.04434, section 2.1. Ring attention in balanced halves: arXiv:2310.01889.
Ulysses: arXiv:2309.14509, section 3.
"""

from costmodels.job import Target, TrainingJob
from costmodels.model import LatentAttention, LayerKind, ModelSpec
from costmodels.network.ops import HALF, Attention, Collective, Gemm, MemoryPass, Op, Size
from costmodels.network.shard import Shard, per_rank

# Bytes that pass through memory per score, forward and backward, beside the two products. Fused:
# read, scale, mask, softmax, write, then dropout. Unfused: scale, mask, cast to fp32, softmax and
# cast back are kernels of their own. Kind: chosen, from the dtypes and passes of each kernel.
_SCORE_BYTES = {"fused-softmax": (9, 11), "torch-softmax": (30, 28)}
_SCORE_KERNELS = {"fused-softmax": (2, 2), "torch-softmax": (6, 6)}
_FUSED_SOFTMAX_TARGETS = (Target.MEGATRON, Target.DEEPSPEED)


def attention_kernel(job: TrainingJob) -> str:
    """Return the kernel in use: the job's own, or what the target does without a fused kernel."""
    kernel = job.switches.attention_kernel
    if job.flash_attention or not kernel.startswith("flash"):
        return kernel
    return "fused-softmax" if job.target in _FUSED_SOFTMAX_TARGETS else "torch-softmax"


def visible_keys(seq_len: int, window: int | None) -> float:
    """Return the keys that a query of a causal kernel sees on average.

    seq_len / 2 without a window; with one of w tokens w - w^2 / (2 seq_len), since the first w
    queries do not fill it.

    Args:
        seq_len: Tokens of the sequence.
        window: Width of the attention window; None sees everything before it.

    """
    if window is None or window >= seq_len:
        return seq_len / 2
    return window - window * window / (2 * seq_len)


def attention_ops(
    model: ModelSpec, job: TrainingJob, kind: LayerKind, shard: Shard
) -> tuple[Op, ...]:
    """Return the ops between the block's norm and its residual connection."""
    latent = model.latent_attention
    project = _projections(model, job, shard) if latent is None else _latent(model, latent, shard)
    widths = (
        (model.head_dim, model.head_dim)
        if latent is None
        else (latent.qk_head_dim, latent.v_head_dim)
    )
    heads = per_rank(model.num_attention_heads, shard.tensor_parallel)
    key_value_heads = heads if latent else per_rank(model.num_kv_heads, shard.tensor_parallel)
    return (
        *project,
        *_exchange(
            shard, heads * widths[0] + _sent_heads(key_value_heads, shard) * sum(widths), "in"
        ),
        *_ring(shard, key_value_heads * sum(widths)),
        *_core(job, kind, shard, heads, widths),
        *_exchange(shard, heads * widths[1], "out"),
        Gemm(
            name="attention_output",
            module="attention",
            m=shard.tokens,
            n=model.hidden_size,
            k=heads * widths[1],
            trained=job.lora_rank is None,
        ),
    )


def _projections(model: ModelSpec, job: TrainingJob, shard: Shard) -> tuple[Op, ...]:
    heads = per_rank(model.num_attention_heads, shard.tensor_parallel)
    key_value = per_rank(model.num_kv_heads, shard.tensor_parallel)
    rotated = shard.tokens * (heads + key_value) * model.head_dim
    has_rope = model.rope_theta is not None
    passes = _rope_passes(job)
    ops: list[Op] = [
        Gemm(
            name="attention_qkv",
            module="attention",
            m=shard.tokens,
            n=(heads + 2 * key_value) * model.head_dim,
            k=model.hidden_size,
            trained=job.lora_rank is None,
        )
    ]
    if model.qk_norm != "none":
        ops.append(
            MemoryPass(
                name="qk_norm",
                module="layernorm",
                forward=2 * HALF * rotated,
                backward=3 * HALF * rotated,
                forward_kernels=2,
                backward_kernels=4,
            )
        )
    if has_rope:
        ops.append(
            MemoryPass(
                name="rope",
                module="attention",
                forward=2 * HALF * rotated * passes,
                backward=2 * HALF * rotated * passes,
                forward_kernels=2 * passes,
                backward_kernels=2 * passes,
            )
        )
    return tuple(ops)


def _rope_passes(job: TrainingJob) -> int:
    """Return how often RoPE reads and writes what it rotates."""
    if job.target is Target.MEGATRON or job.switches.compile:
        return 1
    # Eager: rotate halves, two products, one sum; our graph negates and joins the halves apart.
    return 5 if job.target is Target.NATIVE else 3


def _latent(model: ModelSpec, latent: LatentAttention, shard: Shard) -> tuple[Op, ...]:
    heads = per_rank(model.num_attention_heads, shard.tensor_parallel)
    hidden = model.hidden_size
    down = latent.kv_lora_rank + latent.qk_rope_head_dim + (latent.q_lora_rank or 0)
    outer, tokens = shard.outer_tokens, shard.tokens
    return (
        Gemm(name="latent_down", module="attention", m=outer, n=down, k=hidden),
        MemoryPass(
            name="latent_norm",
            module="layernorm",
            forward=2 * HALF * outer * down,
            backward=3 * HALF * outer * down,
            forward_kernels=2,
            backward_kernels=4,
        ),
        Gemm(
            name="latent_query_up",
            module="mla_up_proj",
            m=tokens,
            n=heads * latent.qk_head_dim,
            k=latent.q_lora_rank or hidden,
        ),
        Gemm(
            name="latent_key_value_up",
            module="mla_up_proj",
            m=tokens,
            n=heads * (latent.qk_nope_head_dim + latent.v_head_dim),
            k=latent.kv_lora_rank,
        ),
        MemoryPass(  # rotate, and join the parts with and without position per head
            name="rope",
            module="mla_up_proj",
            forward=2 * HALF * tokens * heads * (2 * latent.qk_head_dim),
            backward=2 * HALF * tokens * heads * (2 * latent.qk_head_dim),
            forward_kernels=12,
            backward_kernels=12,
        ),
    )


def _sent_heads(heads: Size, shard: Shard) -> Size:
    """Key-value heads that a rank sends in Ulysses: those fewer than ranks are copied first."""
    return shard.context_parallel * per_rank(heads, shard.context_parallel)


def _exchange(shard: Shard, width: Size, side: str) -> tuple[Op, ...]:
    """Trade tokens for heads over the context axis before attention, and back after (Ulysses)."""
    payload = HALF * shard.tokens * width * shard.ulysses
    return (
        Collective(
            name=f"ulysses_{side}",
            module="attention",
            axis="cp",
            group="context",
            forward="all_to_all",
            backward="all_to_all",
            payload=payload,
        ),
    )


def _ring(shard: Shard, width: Size) -> tuple[Op, ...]:
    """Keys and values of the other context ranks: passed around beside attention, or gathered.

    What was gathered is not kept, but gathered again for backward.
    """
    own = HALF * shard.tokens * width
    whole = own * shard.context_parallel * (1 - shard.ring) * (1 - shard.ulysses)
    return (
        Collective(
            name="ring_key_value",
            module="core_attn",
            axis="cp",
            group="context",
            forward="ring",
            backward="ring",
            payload=own * shard.ring,
        ),
        Collective(
            name="gather_key_value",
            module="core_attn",
            axis="cp",
            group="context",
            forward="all_gather",
            backward="reduce_scatter",
            payload=whole,
        ),
        Collective(
            name="gather_key_value_again",
            module="core_attn",
            axis="cp",
            group="context",
            forward="",
            backward="all_gather",
            payload=whole,
        ),
    )


def _core(
    job: TrainingJob, kind: LayerKind, shard: Shard, heads: Size, widths: tuple[int, int]
) -> tuple[Op, ...]:
    kernel = attention_kernel(job)
    sequences = shard.micro_batch_size * heads
    if kernel.startswith("flash"):
        # Each query meets its visible keys once per product; a rank holds 1 / cp of the queries.
        pairs = sequences * int(job.seq_len * visible_keys(job.seq_len, kind.window))
        # Torch's flash kernels take one width: our runtime pads narrower values for them.
        work = 2 * max(widths) if job.target is Target.NATIVE else sum(widths)
        return (
            Attention(
                name="attention_core",
                module="core_attn",
                flops=2 * pairs * work // shard.context_parallel,
                length=_kernel_length(job.seq_len, shard),
                head_width=min(widths),
            ),
        )
    return _scores(job, shard, sequences, widths, kernel)


def _kernel_length(seq_len: int, shard: Shard) -> Size:
    """Tokens per kernel call: ring attention works on balanced halves of each rank's share."""
    cut = 1 + (2 * shard.context_parallel - 1) * shard.ring * (shard.context_parallel > 1)
    return seq_len // cut


def _scores(
    job: TrainingJob, shard: Shard, sequences: Size, widths: tuple[int, int], kernel: str
) -> tuple[Op, ...]:
    """Attention that writes its scores to memory: two batched products around a softmax."""
    queries = job.seq_len // shard.context_parallel
    scores = sequences * queries * job.seq_len
    forward, backward = _SCORE_BYTES[kernel]
    forward_kernels, backward_kernels = _SCORE_KERNELS[kernel]
    products = {
        "attention_scores": (job.seq_len, widths[0]),
        "attention_values": (widths[1], job.seq_len),
    }
    gemms = [
        Gemm(
            name=name,
            module="core_attn",
            m=queries,
            n=n,
            k=k,
            count=sequences,
            weight=False,
            quantised=False,
        )
        for name, (n, k) in products.items()
    ]
    softmax = MemoryPass(
        name="softmax",
        module="core_attn",
        forward=forward * scores,
        backward=backward * scores,
        forward_kernels=forward_kernels,
        backward_kernels=backward_kernels,
        cause="attention",
    )
    return gemms[0], softmax, gemms[1]
