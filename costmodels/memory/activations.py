"""Activations of one layer on one rank, by recompute policy.

The formulas (`costmodels.formulas.activations`) give bytes by what keeps them; a policy is the set
of parts that it drops. Everything takes a LayoutTable and returns one value per layout.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodels.compiled.activations import LayerActivations
from costmodels.job import TrainingJob
from costmodels.layout import Recompute
from costmodels.layout_table import RECOMPUTES, LayoutTable
from costmodels.memory.layer_parts import layer_parts
from costmodels.model import LayerKind, ModelSpec
from costmodels.targets import BEHAVIOURS

Column = NDArray[np.float64]

LAYERS_BEING_MOVED = 2  # chosen: offloaded by the layer, one on its way, one at work
OF_BLOCK = frozenset({"mlp", "moe", "moe_act", "per-op", "every-2nd-layer"})  # drop what it keeps


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
    parts = layer_parts(model, job, kind, table)
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
