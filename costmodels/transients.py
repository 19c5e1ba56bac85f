"""Bytes that are alive for a moment only, beside states and activations in flight.

Gradients inside a layer's backward pass, weights that ZeRO-3 has gathered, whole gradients before
they are reduced, communication buckets, placeholder gradients, pipeline messages. Each is a habit
of a target runtime (`costmodels.targets`); a rank pays the largest of the moments in which its
layers or its head run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodels.activations import LayerBytes, element_bytes, tokens_per_rank
from costmodels.job import TrainingJob
from costmodels.layout_table import LayoutTable
from costmodels.model import LayerKind, ModelSpec
from costmodels.parameters import layer_parameters
from costmodels.states import ZERO_2, BlockStates, bytes_per_weight
from costmodels.targets import BEHAVIOURS

Column = NDArray[np.float64]

SHARE_OF_LARGEST_MATRIX = 1 / 3  # of a layer: one of three feed-forward matrices, or less
MESSAGES_IN_FLIGHT = 2  # a pipeline rank receives one activation and one gradient ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class Transients:
    """Bytes beside states and activations, one value per layout.

    Attributes:
        boundary: Per micro-batch in flight: the output that a stage keeps beside what it sent.
        gathered: Weights that ZeRO-3 holds whole.
        always: Buckets, placeholders and messages, whatever runs.
        layers: While a layer runs backward.
        recompute: The same where it is recomputed in full first.
        after_head: What the last layer meets on top: the head's gradients under reduction.
        embedding: While the embedding runs backward, last of all.
        released: Of `gathered`, what is no longer held by then: the layers.
        head: While the head runs backward, the logits and their gradient apart.
        head_put_off: While its weight's gradient is computed that was put off: autograd copies
            what it is handed.

    """

    boundary: Column
    gathered: Column
    always: Column
    layers: Column
    recompute: Column
    after_head: Column
    embedding: Column
    released: Column
    head: Column
    head_put_off: Column


def transients(
    model: ModelSpec,
    job: TrainingJob,
    table: LayoutTable,
    *,
    states: Sequence[BlockStates],
    activations: Sequence[LayerBytes],
    embedding: BlockStates,
    head: BlockStates,
) -> Transients:
    """Return what is alive for a moment.

    Args:
        model: The network.
        job: Precision, target, sequence length.
        table: Layouts.
        states: Of one layer of each kind.
        activations: Of one layer of each kind.
        embedding: States before the first layer.
        head: States after the last layer.

    """
    always = _buffers(job, table) + _placeholders(model, job, table) + _messages(model, job, table)
    gradients = np.maximum.reduce([_whole_gradients(job, table, block) for block in states])
    largest = np.maximum.reduce(
        [_product(job, block.local_weights * SHARE_OF_LARGEST_MATRIX) for block in states]
    )
    backward = np.maximum.reduce([layer.transient for layer in activations])
    brought_back = np.maximum.reduce([layer.everything - layer.recomputed for layer in activations])
    outstanding = gradients if BEHAVIOURS[job.target].collects_gradients else 0.0
    layers = always + gradients + outstanding + largest + backward
    of_head = _whole_gradients(job, table, head)
    stream = _stream(model, job, table)
    # A tied table's gradient from the head waits for the one from the embedding, and their sum;
    # the sum alone is left when it moves into its reduction buffer.
    is_tied = model.tied_embeddings & (table.pipeline_parallel == 1)
    of_table = _product(job, embedding.local_weights)
    copies = np.where(is_tied, 3, 1)
    gathered = _gathered(job, states, embedding, head)
    ends_stay = BEHAVIOURS[job.target].keeps_ends_gathered
    output = np.where(is_tied, embedding.local_weights, head.local_weights)
    return Transients(
        boundary=stream * BEHAVIOURS[job.target].keeps_stage_outputs,
        gathered=gathered,
        always=always,
        layers=layers,
        recompute=layers + brought_back,
        after_head=np.maximum(of_head - gradients, 0.0) * (outstanding is gradients),
        embedding=always
        + outstanding
        + np.maximum(of_table * copies, of_table + _whole_gradients(job, table, embedding)),
        released=np.maximum(gathered - embedding.gathered - head.gathered * ends_stay, 0.0),
        head=always + of_head + _product(job, output),
        head_put_off=always + of_head + 2 * _product(job, output),
    )


def _gathered(
    job: TrainingJob, states: Sequence[BlockStates], embedding: BlockStates, head: BlockStates
) -> Column:
    """Return the weights that ZeRO-3 holds whole: a few layers, and the ends if they stay."""
    behaviour = BEHAVIOURS[job.target]
    layer = np.maximum.reduce([block.gathered for block in states])
    ahead = behaviour.gathered_layers * layer
    if behaviour.keeps_ends_gathered:
        return np.asarray(ahead + embedding.gathered + head.gathered)
    return np.asarray(np.maximum(ahead, layer + np.maximum(embedding.gathered, head.gathered)))


def _whole_gradients(job: TrainingJob, table: LayoutTable, block: BlockStates) -> Column:
    """Return a block's gradients before they are cut: in 16 bits, and in the reduced format."""
    per_weight = bytes_per_weight(job)
    is_cut = (table.zero_stage >= ZERO_2) & (job.lora_rank is None)
    waiting = 0 if BEHAVIOURS[job.target].collects_gradients else per_weight.working
    return np.where(is_cut, block.cut_weights * (waiting + per_weight.gradient), 0.0)


def _product(job: TrainingJob, weights: Column) -> Column:
    """Return a weight gradient in 16 bits that exists beside the one it is added to."""
    if BEHAVIOURS[job.target].fused_weight_gradient or job.lora_rank is not None:
        return np.zeros_like(weights)
    return weights * bytes_per_weight(job).working


def _buffers(job: TrainingJob, table: LayoutTable) -> Column:
    """Return communication buckets that live beside activations.

    Stages 2 and 3 reduce during backward; stage 1 does once per step, when activations are gone.
    """
    spread = table.data_parallel * table.context_parallel > 1
    during_backward = spread & (table.zero_stage >= ZERO_2)
    return np.where(during_backward, 2 * BEHAVIOURS[job.target].bucket_bytes, 0.0)


def _placeholders(model: ModelSpec, job: TrainingJob, table: LayoutTable) -> Column:
    """Return one 16-bit placeholder gradient per weight shape, kept by Transformer Engine."""
    if not BEHAVIOURS[job.target].dummy_weight_gradients or job.lora_rank is not None:
        return np.zeros(len(table))
    shapes = np.zeros(len(table))
    plain = LayerKind(window=None, has_experts=False)
    routed = LayerKind(window=None, has_experts=True)
    used = {kind.has_experts for kind in model.layer_kinds}
    dense = layer_parameters(model, routed if True in used else plain)
    shapes += (dense.attention_matrices + dense.ffn_matrices) / table.tensor_parallel
    if used == {False, True}:
        shapes += layer_parameters(model, plain).ffn_matrices / table.tensor_parallel
    if model.moe is not None:
        one_expert = dense.expert_matrices / model.moe.num_experts
        shapes += one_expert / table.expert_tensor_parallel
    return shapes * bytes_per_weight(job).working


def _messages(model: ModelSpec, job: TrainingJob, table: LayoutTable) -> Column:
    """Return the buffers of pipeline messages."""
    stream = _stream(model, job, table)
    early = BEHAVIOURS[job.target].preallocates_messages
    ahead = 2 * table.num_micro_batches if early else MESSAGES_IN_FLIGHT
    return np.where(table.pipeline_parallel > 1, ahead * stream, 0.0)


def _stream(model: ModelSpec, job: TrainingJob, table: LayoutTable) -> Column:
    """Return one micro-batch's residual stream, as it passes between stages."""
    shards = np.where(table.sequence_parallel == 1, table.tensor_parallel, 1)
    return np.asarray(element_bytes(job) * tokens_per_rank(job, table) * model.hidden_size / shards)
