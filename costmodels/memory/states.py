"""Model states of a rank, block by block: weights per rank, their bytes, host copies.

What a weight takes is in `weight_bytes`; the weights themselves come from `costmodels.parameters`,
the formulas from `costmodels.formulas.states`. Everything takes a LayoutTable and returns arrays
with one value per layout (a single layout is a table of one row).
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from costmodels.compiled.states import ModelStates, model_states
from costmodels.job import TrainingJob
from costmodels.layout_table import LayoutTable
from costmodels.memory.weight_bytes import (
    bytes_per_weight,
)
from costmodels.model import LayerKind, ModelSpec
from costmodels.network.shard import padded_rows
from costmodels.parameters import (
    LayerParameters,
    embedding_parameters,
    head_parameters,
    layer_parameters,
)
from costmodels.targets import BEHAVIOURS

Column = NDArray[np.float64]

ZERO_2, ZERO_3 = 2, 3

# Pinned host blocks are rounded up to powers of two: 4/3 on average for sizes spread evenly.
# chosen; DeepSpeed#3448 saw 750-800 GB where 18 bytes per weight come to 585 GB: a factor 1.33.
PINNED_HOST_FACTOR = 4 / 3
HOST_GRADIENT_BYTES = 4  # the optimizer on the host keeps fp32 gradients beside its states


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStates:
    """Bytes of one block's states on a rank that holds it.

    Attributes:
        local_weights: Weights that the rank computes with.
        cut_weights: Those of them that ZeRO may cut: experts that one rank alone holds stay whole.
        local_experts: Those of them that are routed experts'.
        reduced_last: Cut weights of the bucket that is reduced last of the block's, whose gradients
            wait while the block before runs backward: what the tensor axis does not cut, for that
            is laid first.
        late_gradients: Bytes of cut gradients that come into being with the step's last backward
            pass, beside `gradients`.
        gathered: Bytes of those weights when ZeRO-3 has gathered them; 0 where they always are.

    """

    parameters: Column
    gradients: Column
    optimizer: Column
    local_weights: Column
    cut_weights: Column
    local_experts: Column
    reduced_last: Column
    late_gradients: Column
    gathered: Column
    host: Column

    @property
    def total(self) -> Column:
        """All states on the GPU."""
        return self.parameters + self.gradients + self.optimizer


def layer_states(
    model: ModelSpec, job: TrainingJob, kind: LayerKind, table: LayoutTable
) -> BlockStates:
    """Return the states of one layer of a kind."""
    weights = layer_parameters(model, kind)
    return _block(
        job,
        table,
        model.num_kv_heads,
        sharded=weights.query_and_output_matrices + weights.ffn_matrices + weights.sharded_vectors,
        key_value=weights.key_value_matrices,
        replicated=weights.latent_matrices + weights.router + weights.replicated_vectors,
        experts=weights.expert_parameters,
        adapters=_adapter_weights(model, weights, job.lora_rank),
    )


def embedding_states(model: ModelSpec, job: TrainingJob, table: LayoutTable) -> BlockStates:
    """Return the states of the block before the first layer."""
    vocab = padded_rows(model, job.target, table.tensor_parallel)
    rows = vocab * model.hidden_size
    rest = embedding_parameters(model) - model.vocab_size * model.hidden_size
    return _block(job, table, 1, sharded=rows, replicated=rest)


def head_states(model: ModelSpec, job: TrainingJob, table: LayoutTable) -> BlockStates:
    """Return the states of the block after the last layer.

    A tied head shares the embedding's matrix where one rank holds both; with a pipeline the last
    stage has its own copy.
    """
    vocab = padded_rows(model, job.target, table.tensor_parallel)
    matrix = vocab * model.hidden_size
    own = matrix if not model.tied_embeddings else np.where(table.pipeline_parallel > 1, matrix, 0)
    bias = vocab if model.head_bias else 0
    norm = head_parameters(model)
    norm -= 0 if model.tied_embeddings else model.vocab_size * model.hidden_size
    norm -= model.vocab_size if model.head_bias else 0
    apart = model.tied_embeddings  # the table is shared with another unit or stage
    return _block(job, table, 1, sharded=own + bias, replicated=norm, is_laid_apart=apart)


def _block(
    job: TrainingJob,
    table: LayoutTable,
    num_kv_heads: int,
    *,
    sharded: NDArray[np.int64] | NDArray[np.float64] | int,
    replicated: int,
    key_value: int = 0,
    experts: int = 0,
    adapters: float = 0.0,
    is_laid_apart: bool = False,
) -> BlockStates:
    """Return the states of some weights; frozen under LoRA, where only adapters train.

    What is whole on every rank shares its bucket with the others where the tensor axis cuts
    nothing, unless they are laid apart.
    """
    per_weight = bytes_per_weight(job)
    trains_all = job.lora_rank is None
    states = model_states(
        sharded_weights=sharded,
        key_value_weights=key_value,
        replicated_weights=replicated,
        expert_weights=experts,
        tensor_parallel=table.tensor_parallel,
        key_value_shards=np.minimum(table.tensor_parallel, num_kv_heads),
        expert_shards=table.expert_parallel * table.expert_tensor_parallel,
        zero_stage=table.zero_stage,
        zero_group=table.zero_group,
        weight_bytes=per_weight.working,
        resident_bytes=per_weight.resident if trains_all else per_weight.working,
        gradient_bytes=per_weight.gradient if trains_all else 0,
        optimizer_bytes=per_weight.optimizer if trains_all else 0,
    )
    if adapters:
        states = _with_adapters(job, table, states, adapters / table.tensor_parallel)
    of_experts = np.broadcast_to(
        experts / (table.expert_parallel * table.expert_tensor_parallel), len(table)
    )
    apart = (table.tensor_parallel > 1) | is_laid_apart
    last = np.where(apart, replicated, states.local_weights - of_experts)
    placed = _placed(job, table, states)
    return replace(
        placed,
        local_experts=of_experts.astype(np.float64),
        reduced_last=np.where(table.zero_group > 1, last, 0.0),
    )


def _with_adapters(
    job: TrainingJob, table: LayoutTable, states: ModelStates, adapters: Column
) -> ModelStates:
    per_weight = bytes_per_weight(job)
    shards = np.where(table.zero_stage >= 1, table.zero_group, 1)
    return states._replace(
        parameters=states.parameters + adapters * per_weight.working,
        gradients=states.gradients + adapters * per_weight.gradient,
        optimizer=states.optimizer + adapters * per_weight.optimizer / shards,
    )


def _placed(job: TrainingJob, table: LayoutTable, states: ModelStates) -> BlockStates:
    """Return states where the target and offloading put them."""
    behaviour = BEHAVIOURS[job.target]
    per_weight = bytes_per_weight(job)
    shards_weights = table.zero_stage == ZERO_3
    moves = table.offload_parameters.astype(bool)  # by the unit, whoever else holds them
    whole = np.where(moves, states.local_weights, states.cut_weights) * per_weight.working
    in_pipeline = (table.pipeline_parallel > 1) & behaviour.keeps_gathered_in_pipeline
    stays = shards_weights & (in_pipeline | (table.keep_gathered == 1))
    parameters = states.parameters + np.where(stays, whole, 0)
    trains_all = job.lora_rank is None
    whole_gradients = states.local_weights * per_weight.gradient * trains_all
    gradients = np.where(shards_weights & in_pipeline, whole_gradients, states.gradients)
    is_late = (table.zero_stage >= ZERO_2) & (table.num_micro_batches == 1)
    is_late &= behaviour.cuts_gradients_late & (table.stages_per_rank == 1)
    uncut = (states.local_weights - states.cut_weights) * per_weight.gradient * trains_all
    late = np.where(is_late, gradients - uncut, 0)
    if behaviour.cuts_gradients_late and per_weight.optimizer:
        shard = states.optimizer / per_weight.optimizer * per_weight.gradient - uncut
        late = np.where((table.zero_stage == 1) & (table.zero_group > 1), shard, late)
    moves_optimizer = moves | table.offload_optimizer.astype(bool)
    host = np.where(moves, parameters, 0) + np.where(moves_optimizer, states.optimizer, 0)
    shard_weights = states.optimizer / max(per_weight.optimizer, 1)
    host = host + np.where(moves_optimizer, shard_weights * HOST_GRADIENT_BYTES, 0)
    return BlockStates(
        parameters=np.where(moves, 0, parameters),
        gradients=np.where(is_late, uncut, gradients),
        late_gradients=late,
        optimizer=np.where(moves_optimizer, 0, states.optimizer),
        local_weights=states.local_weights,
        cut_weights=states.cut_weights,
        local_experts=np.zeros(len(table)),
        reduced_last=np.zeros(len(table)),
        gathered=np.where(shards_weights & ~stays, whole, 0),
        host=host * PINNED_HOST_FACTOR,
    )


def _adapter_weights(model: ModelSpec, weights: LayerParameters, rank: int | None) -> float:
    """Return the weights of low-rank adapters on attention and dense feed-forward matrices.

    An adapter of rank r on an n x m matrix has r (n + m) weights (Hu et al. 2021,
    arXiv:2106.09685).
    """
    if rank is None:
        return 0.0
    hidden = model.hidden_size
    query = model.num_attention_heads * model.head_dim
    key_value = model.num_kv_heads * model.head_dim
    widths = 2.0 * (hidden + query) + 2 * (hidden + key_value)
    matrices = 3 if model.gated_ffn else 2
    ffn_width = weights.ffn_matrices / (matrices * hidden)
    if ffn_width:
        widths += matrices * (hidden + ffn_width)
    return float(rank * widths)
