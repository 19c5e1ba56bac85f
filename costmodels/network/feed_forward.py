"""Ops of a feed-forward block: one dense pair or triple of products, or routed experts.

Experts: each token visits `experts_per_token` of them. Tokens travel to the ranks that hold their
experts and back (dispatch, combine); expert-tensor parallelism gathers the tokens of its group and
cuts each expert's width. A rank's experts run as one grouped product.

Sources: Shazeer et al., arXiv:1701.06538; dropless dispatch: arXiv:2211.15841; folding of the
expert axes over tensor, context and data: arXiv:2504.14960; one copy per node: DeepSeek-V3,
arXiv:2412.19437, section 3.2.2.
"""

from costmodels.job import Target, TrainingJob
from costmodels.model import MixtureOfExperts, ModelSpec
from costmodels.network.ops import FULL, HALF, Collective, Gemm, MemoryPass, Op, Size
from costmodels.network.shard import Shard, per_rank

_COUNT = 8  # bytes of a number of rows
# Kernels that sort token copies by expert, one way. Kind: chosen. Around a plain all-to-all these
# are torch's sorts, index maps and gathers. DeepEP and HybridEP hand over a routing map, and fused
# kernels turn it into row numbers and move the rows (NVIDIA/TransformerEngine#1373).
_PERMUTATION_KERNELS = {"alltoall": 10}
_FUSED_PERMUTATION_KERNELS = 2


def dense_ops(
    model: ModelSpec, job: TrainingJob, shard: Shard, width: int, name: str = "ffn"
) -> tuple[Op, ...]:
    """Return a feed-forward block of a width, cut over the tensor axis."""
    own = per_rank(width, shard.tensor_parallel)
    inputs = 2 if model.gated_ffn else 1
    trained = job.lora_rank is None
    return (
        Gemm(
            name=f"{name}_in",
            module="mlp",
            m=shard.tokens,
            n=inputs * own,
            k=model.hidden_size,
            trained=trained,
        ),
        activation(model, job, f"{name}_activation", "mlp", shard.tokens * own),
        Gemm(
            name=f"{name}_out",
            module="mlp",
            m=shard.tokens,
            n=model.hidden_size,
            k=own,
            trained=trained,
        ),
    )


def activation(
    model: ModelSpec, job: TrainingJob, name: str, module: str, elements: Size
) -> MemoryPass:
    """Return the non-linearity between the products; fused kernels touch each element once."""
    inputs = 2 if model.gated_ffn else 1
    fused = job.target is Target.MEGATRON or bool(job.switches.compile)
    # Eager gating is two kernels (activation, product) with the activation written in between.
    between = 0 if fused or inputs == 1 else 2
    return MemoryPass(
        name=name,
        module=module,
        forward=HALF * elements * (inputs + 1 + between),
        backward=HALF * elements * (2 * inputs + 1 + 2 * between),
        forward_kernels=1 if fused else inputs,
        backward_kernels=1 if fused else 2 * inputs,
    )


def expert_ops(
    model: ModelSpec, moe: MixtureOfExperts, job: TrainingJob, shard: Shard
) -> tuple[Op, ...]:
    """Return routing, dispatch, the experts of one rank, and combine."""
    tokens, hidden = shard.routed_tokens, model.hidden_size
    copies = tokens * moe.experts_per_token
    received = copies * shard.expert_tensor_parallel
    experts = per_rank(moe.num_experts, shard.expert_parallel)
    width = per_rank(moe.ffn_hidden_size, shard.expert_tensor_parallel)
    per_expert = per_rank(received, experts)
    inputs = 2 if model.gated_ffn else 1
    grouped = {"m": per_expert, "count": experts, "module": "moe", "trained": job.lora_rank is None}
    return (
        Gemm(
            name="router",
            module="moe",
            m=tokens,
            n=moe.num_experts,
            k=hidden,
            quantised=False,
        ),
        MemoryPass(  # scores, top-k, weights, counts: small kernels over fp32 scores
            name="routing",
            module="moe",
            forward=6 * FULL * tokens * moe.num_experts,
            backward=4 * FULL * tokens * moe.num_experts,
            forward_kernels=60,
            backward_kernels=30,
            host_waits=True,
            follows_precision=False,
        ),
        *_balance(shard, moe),
        *_counts(shard, moe),
        _permutation(job, "permute", copies * hidden),
        _all_to_all(job, moe, "dispatch", HALF * copies * hidden, experts),
        _expert_tensor(shard, "expert_gather", "all_gather", "reduce_scatter", received * hidden),
        Gemm(name="expert_in", n=inputs * width, k=hidden, **grouped),
        activation(model, job, "expert_activation", "moe_act", received * width),
        Gemm(name="expert_out", n=hidden, k=width, **grouped),
        _expert_tensor(shard, "expert_reduce", "reduce_scatter", "all_gather", received * hidden),
        _all_to_all(job, moe, "combine", HALF * copies * hidden, experts),
        _permutation(job, "unpermute", copies * hidden),
        _join(shard, hidden),
    )


def shared_gate_ops(model: ModelSpec, shard: Shard) -> tuple[Op, ...]:
    """Return the sigmoid gate of width 1 on the always-on expert (Qwen2-MoE)."""
    tokens = shard.outer_tokens
    return (
        Gemm(name="shared_gate", module="mlp", m=tokens, n=1, k=model.hidden_size, quantised=False),
        MemoryPass(
            name="shared_gate_product",
            module="mlp",
            forward=2 * HALF * tokens * model.hidden_size,
            backward=4 * HALF * tokens * model.hidden_size,
        ),
    )


def _balance(shard: Shard, moe: MixtureOfExperts) -> tuple[Op, ...]:
    """Tell the ranks that share sequences what their tokens chose: fp32 per sequence and expert."""
    if not moe.balance_loss:
        return ()
    payload = FULL * shard.micro_batch_size * moe.num_experts
    return tuple(
        Collective(
            name="balance_counts",
            module="moe",
            axis=axis,
            group=group,
            forward="all_reduce",
            backward="",
            payload=payload,
            follows_precision=False,
        )
        for axis, group in (("tp", "tensor"), ("cp", "context"))
    )


def _counts(shard: Shard, moe: MixtureOfExperts) -> tuple[Collective, Collective]:
    """Tell each rank how many rows its experts get: one 64-bit number per expert."""
    ways = shard.expert_tensor_parallel
    sent = _COUNT * moe.num_experts
    return (
        Collective(
            name="expert_counts",
            module="moe",
            axis="ep",
            group="expert",
            forward="all_to_all",
            backward="",
            payload=sent * (shard.expert_parallel > 1),
            follows_precision=False,
        ),
        Collective(
            name="expert_counts_gather",
            module="moe",
            axis="ep",
            group="expert_tensor",
            forward="all_gather",
            backward="",
            payload=sent * ways * (ways > 1),
            follows_precision=False,
        ),
    )


def _join(shard: Shard, hidden: int) -> Collective:
    """Without sequence parallelism tensor ranks route a part each and gather all answers."""
    return Collective(
        name="expert_join",
        module="moe",
        axis="tp",
        group="tensor",
        forward="",
        backward="",
        plain_forward="all_gather",
        plain_backward="all_gather",
        payload=HALF * shard.tokens * hidden,
    )


def _permutation(job: TrainingJob, name: str, elements: Size) -> MemoryPass:
    """Sort token copies by expert, or weigh and sum them back."""
    kernels = _PERMUTATION_KERNELS.get(job.switches.expert_dispatch, _FUSED_PERMUTATION_KERNELS)
    return MemoryPass(
        name=name,
        module="moe",
        forward=2 * HALF * elements,
        backward=2 * HALF * elements,
        forward_kernels=kernels,
        backward_kernels=kernels,
    )


def _expert_tensor(
    shard: Shard, name: str, forward: str, backward: str, elements: Size
) -> Collective:
    return Collective(
        name=name,
        module="moe",
        axis="ep",
        group="expert_tensor",
        forward=forward,
        backward=backward,
        payload=HALF * elements * (shard.expert_tensor_parallel > 1),
    )


def _all_to_all(
    job: TrainingJob, moe: MixtureOfExperts, name: str, payload: Size, experts: Size
) -> Collective:
    return Collective(
        name=name,
        module="moe",
        axis="ep",
        group="expert",
        forward="all_to_all",
        backward="all_to_all",
        payload=payload,
        beside="expert_in",
        copies=moe.experts_per_token,
        experts=experts,
        nodes_per_token=moe.groups_per_token if moe.num_groups > 1 else 0,
        once_per_node=job.switches.expert_dispatch in ("deepep", "hybridep"),
    )
