"""Bytes that are alive for a moment only, beside states and activations in flight.

Gradients inside a layer's backward pass, weights that ZeRO-3 has gathered, whole gradients before
they are reduced, communication buckets, placeholder gradients, pipeline messages. Each is a habit
of a target runtime (`costmodels.targets`); a rank pays the largest of the moments in which its
layers or its head run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from costmodels.job import TrainingJob
from costmodels.layout_table import LayoutTable
from costmodels.memory.activations import LayerBytes
from costmodels.memory.layer_parts import element_bytes, tokens_per_rank
from costmodels.memory.states import ZERO_2, BlockStates
from costmodels.memory.weight_bytes import bytes_per_weight
from costmodels.model import LayerKind, ModelSpec
from costmodels.parameters import layer_parameters
from costmodels.targets import BEHAVIOURS

Column = NDArray[np.float64]

SHARE_OF_LARGEST_MATRIX = 1 / 3  # of a layer: one of three feed-forward matrices, or less
MANY_LAYERS = 3  # of a stage: one at work, one whose gradients are reduced, one that is gathered
MESSAGES_IN_FLIGHT = 2  # a pipeline rank receives one activation and one gradient ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTransients:
    """Bytes beside states and activations while a layer runs backward, one value per layout.

    Attributes:
        whole: Its weights, gathered.
        at_work: What it needs itself, for both gradients.
        by_input: For the input's gradient alone: what W wants stays.
        by_weight: For the weights' gradients alone.
        least: The least of it whichever of them the layout's schedule has.
        brought_back: What comes on top where it is recomputed in full first.
        fetched: What comes on top where its activations are on the host.
        behind: What the layer before it meets on top: gradients that are still being reduced.
        least_whole: The least of `whole` whichever passes the schedule has.
        least_behind: The least of `behind`.

    """

    whole: Column
    at_work: Column
    by_input: Column
    by_weight: Column
    least: Column
    brought_back: Column
    fetched: Column
    behind: Column
    least_whole: Column
    least_behind: Column

    def least_of_stage(
        self, num_layers: int, *, grown: float, released: Column, brought_back: Column | float = 0.0
    ) -> Column:
        """Return the least of a stage's layers while they run backward, but for `whole_ends`.

        The larger of the last layer and of the one before it, by when the last one has let its
        activations go; never more than what `ranks.fullest_moment` finds.

        Args:
            num_layers: Of the stage, at least.
            grown: Reserved bytes per byte that comes and goes, gathered weights apart.
            released: What a layer lets go of per micro-batch, at most, `grown` in.
            brought_back: What recomputation brings back, `grown` in.

        """
        last = self.least_whole * (1 + (num_layers > 1)) + grown * self.least + brought_back
        if num_layers == 1:
            return last
        before = self.least_whole * (1 + (num_layers >= MANY_LAYERS))
        before = before + grown * (self.least + self.least_behind) + brought_back - released
        return np.maximum(last, before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transients:
    """Bytes beside states and activations, one value per layout.

    ZeRO-3 holds the unit at work whole, and the one that follows: while a layer runs backward,
    the layer before it or, for the first one, the embedding.

    Attributes:
        layers: Of a layer of each kind, buckets, placeholders and messages in.
        boundary: Per micro-batch in flight: the output that a stage keeps beside what it sent.
        whole_ends: Weights of embedding and head, where they stay gathered.
        whole_embedding: Of the embedding, beside `whole_ends`.
        whole_head: While the head runs, beside `whole_ends`.
        always: Buckets, placeholders and messages, whatever runs.
        after_head: What the last layer meets on top of the head.
        embedding: While the embedding runs backward, last of all.
        head: While the gradient of the head's matrix is computed, that of the logits apart.
        head_kept: When it moves to where it is reduced; the gradient of the logits is gone.
        head_put_off: While its weight's gradient is computed that was put off: autograd copies
            what it is handed.

    """

    layers: tuple[LayerTransients, ...]
    boundary: Column
    whole_ends: Column
    whole_embedding: Column
    whole_head: Column
    always: Column
    after_head: Column
    embedding: Column
    head: Column
    head_kept: Column
    head_put_off: Column

    def largest(self, kinds: Sequence[int]) -> LayerTransients:
        """Return the most that layers of some kinds need, by their places in `layers`."""
        among = [self.layers[kind] for kind in kinds]
        if len(among) == 1:
            return among[0]
        return LayerTransients(
            **{
                part.name: np.maximum.reduce([getattr(layer, part.name) for layer in among])
                for part in fields(LayerTransients)
            }
        )


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
    behaviour = BEHAVIOURS[job.target]
    always = _buffers(job, table) + _placeholders(model, job, table) + _messages(model, job, table)
    layers = tuple(
        _layer_transients(job, table, block, layer, always)
        for block, layer in zip(states, activations, strict=True)
    )
    of_head = _whole_gradients(job, table, head)
    stream = _stream(model, job, table)
    # A tied table's gradient from the head waits for the one from the embedding, and their sum;
    # the sum alone is left when it moves into its reduction buffer.
    is_tied = model.tied_embeddings & (table.pipeline_parallel == 1)
    of_table = _product(job, embedding.local_weights)
    copies = np.where(is_tied, 3, 1)
    output = np.where(is_tied, embedding.local_weights, head.local_weights)
    ends_stay = behaviour.keeps_ends_gathered
    largest_whole = np.maximum.reduce([block.gathered for block in states])
    of_output = np.where(is_tied, embedding.gathered, head.gathered)
    return Transients(
        layers=layers,
        boundary=stream * behaviour.keeps_stage_outputs,
        whole_ends=(embedding.gathered + head.gathered) * ends_stay,
        whole_embedding=embedding.gathered * (not ends_stay),
        whole_head=largest_whole + (largest_whole if ends_stay else of_output),
        always=always,
        after_head=_still_reduced(job, table, head)
        + np.where(is_tied & behaviour.collects_gradients, of_table, 0.0),
        embedding=always
        + layers[0].behind
        + np.maximum(of_table * copies, of_table + _whole_gradients(job, table, embedding)),
        head=always + _product(job, output),
        head_kept=always + of_head + _product(job, output),
        head_put_off=always + of_head + 2 * _product(job, output),
    )


def _layer_transients(
    job: TrainingJob, table: LayoutTable, block: BlockStates, layer: LayerBytes, always: Column
) -> LayerTransients:
    """Return what a layer of one kind needs while it runs backward."""
    of_weights = _whole_gradients(job, table, block) + _product(job, _largest_tensor(job, block))
    at_work = always + np.maximum(of_weights + layer.transient, layer.at_answers)
    by_input = always + np.maximum(layer.transient + layer.stays, layer.at_answers)
    by_weight = always + of_weights
    behind = _still_reduced(job, table, block)
    return LayerTransients(
        whole=block.gathered,
        at_work=at_work,
        by_input=by_input,
        by_weight=by_weight,
        least=np.where(table.puts_off, np.minimum(by_input, by_weight), at_work),
        brought_back=layer.everything - layer.recomputed,
        fetched=layer.fetched * (table.offload_activations == 1),
        behind=behind,
        least_whole=np.where(table.puts_off, 0.0, block.gathered),
        least_behind=np.where(table.puts_off, 0.0, behind),
    )


def _still_reduced(job: TrainingJob, table: LayoutTable, block: BlockStates) -> Column:
    """Return a block's gradients that are reduced while the block before runs backward."""
    is_cut = (table.zero_stage >= ZERO_2) & (job.lora_rank is None)
    waits = is_cut & BEHAVIOURS[job.target].collects_gradients
    return np.where(waits, block.reduced_last * bytes_per_weight(job).gradient, 0.0)


def _largest_tensor(job: TrainingJob, block: BlockStates) -> Column:
    """Return the weights of the largest tensor of a layer."""
    of_experts = block.local_experts * BEHAVIOURS[job.target].largest_expert_share
    return np.maximum(block.local_weights * SHARE_OF_LARGEST_MATRIX, of_experts)


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
