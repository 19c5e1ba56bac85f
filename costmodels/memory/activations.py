"""Activations of one layer on one rank, by recompute policy.

The formulas (`costmodels.formulas.activations`) give bytes by what keeps them; a policy is the set
of parts that it drops. Everything takes a LayoutTable and returns one value per layout.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodels.compiled.activations import LayerActivations, layer_activations
from costmodels.job import Precision, TrainingJob
from costmodels.layout import Recompute
from costmodels.layout_table import RECOMPUTES, LayoutTable
from costmodels.memory.weight_bytes import LOW_PRECISIONS
from costmodels.model import LayerKind, ModelSpec
from costmodels.network.attention import attention_kernel
from costmodels.targets import BEHAVIOURS, FrameworkBehaviour

Column = NDArray[np.float64]

# Kept per attention score. A fused softmax keeps its 16-bit output; a softmax of torch keeps an
# fp32 one and its 16-bit cast for the product with the values.
SCORE_BYTES = {"flash-1": 0, "flash-2": 0, "fused-softmax": 2, "torch-softmax": 6}
# Gradients of probabilities and of scores, alive at once in backward: both in 16 bits, or in fp32.
SCORE_GRADIENT_BYTES = {"fused-softmax": 4, "torch-softmax": 8}
# GPT-2's published training drops attention probabilities and block outputs (0.1 each): unfused
# kernels keep a mask byte and the dropped probabilities; blocks keep a mask byte per value. Flash
# attention draws the mask again; stacks that have it train without the other.
DROPOUT_SCORE_BYTES = 3
# An unfused norm keeps its input in fp32 and the scaled 16-bit value before the weight.
UNFUSED_NORM_BYTES = 6
# Per token and expert: fp32 scores, fp32 probabilities, a boolean map, and 16-bit logits.
ROUTER_BYTES = 11
LAYERS_BEING_MOVED = 2  # chosen: offloaded by the layer, one on its way, one at work
OF_BLOCK = frozenset({"mlp", "moe", "moe_act", "per-op", "every-2nd-layer"})  # drop what it keeps
# chosen: the fullest expert-parallel rank beyond its fair share where routing is not evened out.
EXPERT_IMBALANCE = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Activation bytes of one layer and micro-batch on a rank.

    Attributes:
        kept: Until backward, where the layer is not recomputed in full.
        recomputed: Where it is: its input alone.
        everything: What full recomputation brings back for one layer at a time.
        put_off: Kept between a split backward's halves, where the layer is not recomputed in full.
        put_off_again: The same where it is.
        waiting: The least per micro-batch in flight where it is not: `kept`, or `put_off`.
        transient: Gradients alive at once in backward.
        at_answers: The same before the matrices of experts run.
        stays: What backward lets go before that moment, but not where it is split.
        fetched: What is on the device of `kept` at once where that is on the host.

    """

    kept: Column
    recomputed: Column
    everything: Column
    put_off: Column
    put_off_again: Column
    waiting: Column
    transient: Column
    at_answers: Column
    stays: Column
    fetched: Column


def layer_bytes(
    model: ModelSpec,
    job: TrainingJob,
    kind: LayerKind,
    table: LayoutTable,
    modules: tuple[str, ...] = (),
) -> LayerBytes:
    """Return the activation bytes of one layer.

    Args:
        model: The network.
        job: Sequence length, precision, kernels, target.
        kind: Dense or experts.
        table: Layouts.
        modules: What selective recomputation recomputes; empty for the target's habit.

    """
    parts = _parts(model, job, kind, table)
    parallel_norms = min(model.norms_per_layer, 2)
    late = _gathered_late(model, job, kind, parts)
    everything = _sum(parts) + (parallel_norms - 2) * parts.norm_outputs - late
    everything = np.broadcast_to(everything, len(table)).astype(np.float64)
    selected = modules or BEHAVIOURS[job.target].selective_modules
    selective = _selective(parts, everything, selected, table)
    is_selective = table.recompute == RECOMPUTES.index(Recompute.SELECTIVE)
    kept = np.where(is_selective, selective, everything)
    operands = np.broadcast_to(parts.linear_operands - late, len(table)).astype(np.float64)
    operands_alone = BEHAVIOURS[job.target].puts_off_operands_alone
    put_off = operands if operands_alone else kept
    return LayerBytes(
        kept=kept,
        recomputed=np.broadcast_to(parts.layer_input, len(table)).astype(np.float64),
        everything=everything,
        put_off=put_off,
        put_off_again=operands if operands_alone else everything,
        waiting=np.where(table.puts_off, np.minimum(kept, put_off), kept),
        transient=_transient(parts, drops_block=is_selective & bool(set(selected) & OF_BLOCK)),
        at_answers=np.broadcast_to(parts.answers_transient, len(table)).astype(np.float64),
        stays=np.broadcast_to(
            np.maximum(parts.ffn_activation, parts.expert_activation), len(table)
        ).astype(np.float64),
        fetched=_fetched(parts, kept, by_tensor=BEHAVIOURS[job.target].offloads_by_tensor),
    )


def _sum(parts: LayerActivations) -> Column:
    """Return all that a layer keeps: both blocks' norm outputs, one of the rest."""
    once = (
        parts.layer_input
        + parts.norm_inputs
        + parts.norm_copies
        + parts.latents
        + parts.queries_keys_values
        + parts.qk_norm_inputs
        + parts.attention_scores
        + parts.attention_output
        + parts.ffn_hidden
        + parts.ffn_activation
        + parts.routing
        + parts.expert_inputs
        + parts.expert_hidden
        + parts.expert_activation
        + parts.expert_answers
    )
    return np.asarray(once + 2 * parts.norm_outputs)


def _transient(parts: LayerActivations, drops_block: NDArray[np.bool_]) -> Column:
    """Return gradients alive at once in the wider block of a layer, beside all that it keeps.

    What the feed-forward block kept is gone when attention runs backward.
    """
    gone = (
        parts.ffn_hidden
        + parts.ffn_activation
        + parts.expert_inputs
        + parts.expert_hidden
        + parts.expert_activation
        + parts.expert_answers
    )
    of_attention = parts.attention_transient - np.where(drops_block, 0.0, gone)
    widest: Column = np.maximum(parts.backward_transient, of_attention)
    return widest


def _fetched(parts: LayerActivations, kept: Column, *, by_tensor: bool) -> Column:
    """Return what is on the device of offloaded activations while a layer runs backward.

    By the tensor, the most that one operation saves: attention, or an activation.
    """
    if not by_tensor:
        return LAYERS_BEING_MOVED * kept
    operations = (
        parts.queries_keys_values + parts.attention_output,
        parts.ffn_hidden + parts.ffn_activation,
        parts.expert_hidden + parts.expert_activation,
    )
    most: Column = np.maximum.reduce([np.broadcast_to(saved, len(kept)) for saved in operations])
    return most


def _selective(
    parts: LayerActivations, everything: Column, modules: tuple[str, ...], table: LayoutTable
) -> Column:
    """Return what stays when some modules are recomputed."""
    if "per-op" in modules:
        exchanged = np.where(table.expert_parallel > 1, parts.exchanged_tokens, 0)
        return np.asarray(parts.layer_input + parts.alternate_operations + exchanged)
    if "every-2nd-layer" in modules:
        return np.asarray((everything + parts.layer_input) / 2)
    dropped = {
        "core_attn": parts.attention_scores,
        "mlp": parts.norm_outputs + parts.ffn_hidden + parts.ffn_activation,
        "layernorm": 2 * parts.norm_outputs + parts.norm_copies,
        "moe_act": parts.expert_activation,
        "moe": parts.expert_inputs
        + parts.expert_hidden
        + parts.expert_activation
        + parts.expert_answers,
        "mla_up_proj": parts.queries_keys_values,
    }
    unknown = [module for module in modules if module not in dropped]
    if unknown:
        allowed = ", ".join((*dropped, "per-op", "every-2nd-layer"))
        raise ValueError(f"recompute module {unknown[0]!r} is not known; choose from {allowed}")
    return np.asarray(everything - sum(dropped[module] for module in set(modules)))


def element_bytes(job: TrainingJob) -> int:
    """Return the bytes of one activation value."""
    return 4 if job.precision is Precision.FP32 else 2


def tokens_per_rank(job: TrainingJob, table: LayoutTable) -> Column:
    """Return the tokens of a micro-batch on one rank, before sequence parallelism."""
    return np.asarray(table.micro_batch_size * job.seq_len / table.context_parallel)


def _parts(
    model: ModelSpec, job: TrainingJob, kind: LayerKind, table: LayoutTable
) -> LayerActivations:
    behaviour = BEHAVIOURS[job.target]
    latent, moe = model.latent_attention, model.moe if kind.has_experts else None
    heads = model.num_attention_heads
    tensor = table.tensor_parallel
    tokens = tokens_per_rank(job, table)
    sequence_shards = np.where(table.sequence_parallel == 1, tensor, 1)
    # Tensor ranks never send a token twice: each routes its own part, also of whole sequences.
    routed = tokens / tensor * table.expert_tensor_parallel
    answers = moe.experts_per_token if moe and behaviour.keeps_expert_answers else 0
    answered = tokens / tensor * answers
    ffn_width = model.ffn_hidden_size if moe is None else moe.shared_ffn_hidden_size
    value_dim = latent.v_head_dim if latent else model.head_dim
    key_dim = latent.qk_head_dim if latent else model.head_dim
    key_heads = heads if latent else model.num_kv_heads
    qk_widths = {"none": 0, "per-head": (heads + model.num_kv_heads) * model.head_dim}
    qk_widths["full"] = qk_widths["per-head"]
    bytes_of_input = _input_bytes(job, behaviour)
    return layer_activations(
        tokens=tokens,
        key_length=job.seq_len,
        element_bytes=element_bytes(job),
        input_bytes=bytes_of_input,
        hidden=model.hidden_size,
        tensor_parallel=tensor,
        sequence_shards=sequence_shards,
        input_shards=1 if behaviour.saves_gathered_input else sequence_shards,
        num_heads=heads,
        query_width=heads * key_dim,
        key_width=key_heads * key_dim,
        value_width=key_heads * value_dim,
        output_width=heads * value_dim,
        key_value_shards=np.minimum(tensor, key_heads),
        latent_width=_latent_width(model, sequence_shards if behaviour.gathers_late else 1),
        num_input_norms=1 if model.parallel_block else 2,
        num_output_norms=max(model.norms_per_layer - 2, 0),
        norm_copy_bytes=0 if job.switches.fused_norm else UNFUSED_NORM_BYTES,
        qk_norm_width=qk_widths[model.qk_norm],
        score_bytes=_score_bytes(model, job),
        score_gradient_bytes=SCORE_GRADIENT_BYTES.get(attention_kernel(job), 0),
        ffn_width=ffn_width,
        ffn_inputs=2 if model.gated_ffn else 1,
        ffn_copies=_gate_copies(model, job, behaviour),
        num_experts=moe.num_experts if moe else 0,
        router_bytes=ROUTER_BYTES * sequence_shards / tensor,
        routed_tokens=routed * (moe.experts_per_token * _imbalance(job, table) if moe else 0),
        answered_tokens=answered,
        expert_width=moe.ffn_hidden_size if moe else 0,
        released_width=moe.ffn_hidden_size if answers and moe else 0,
        expert_tensor_parallel=table.expert_tensor_parallel,
    )


def _latent_width(model: ModelSpec, shards_before: Column | int) -> Column | float:
    """Return compressed queries, keys and values, before their norms (cut) and after them."""
    latent = model.latent_attention
    if latent is None:
        return 0
    after = (latent.q_lora_rank or 0) + latent.kv_lora_rank
    return (after + latent.qk_rope_head_dim) / shards_before + after


def _gathered_late(
    model: ModelSpec, job: TrainingJob, kind: LayerKind, parts: LayerActivations
) -> Column | int:
    """Return what whole norm outputs hold too much where a rank keeps its own tokens' alone."""
    if not BEHAVIOURS[job.target].gathers_late:
        return 0
    moe = model.moe if kind.has_experts else None
    is_routed = moe is not None and not moe.shared_ffn_hidden_size
    num_norms = int(model.latent_attention is not None) + int(is_routed)
    return np.asarray(num_norms * (parts.norm_outputs - parts.layer_input))


def _input_bytes(job: TrainingJob, behaviour: FrameworkBehaviour) -> int:
    is_low = job.precision in LOW_PRECISIONS and behaviour.low_precision_inputs
    return 1 if is_low else element_bytes(job)


def _score_bytes(model: ModelSpec, job: TrainingJob) -> int:
    """Return what attention keeps per score; nothing with a flash kernel."""
    kept = SCORE_BYTES.get(attention_kernel(job), 0)
    drops = kept > 0 and model.architecture == "gpt2"
    return kept + (DROPOUT_SCORE_BYTES if drops else 0)


def _gate_copies(model: ModelSpec, job: TrainingJob, behaviour: FrameworkBehaviour) -> int:
    fused = not behaviour.unfused_gate or (behaviour.compiled_gate and bool(job.switches.compile))
    return 1 if model.gated_ffn and not fused else 0


def _imbalance(job: TrainingJob, table: LayoutTable) -> Column:
    """Return the fullest rank's share of routed tokens over the fair one."""
    factor = 1.0 if job.switches.balanced_routing else EXPERT_IMBALANCE
    return np.where(table.expert_parallel > 1, factor, 1.0)
