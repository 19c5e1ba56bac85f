"""Weights of one block on a rank that holds it, by who shares them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodels.job import TrainingJob
from costmodels.layout_table import LayoutTable
from costmodels.model import LayerKind, ModelSpec
from costmodels.network.shard import padded_rows
from costmodels.parameters import embedding_parameters, head_parameters, layer_parameters

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWeights:
    """Weights of one block on a rank that holds it, one entry per row.

    Attributes:
        dense: Cut over the tensor axis or whole; copied over data x context.
        experts: Routed experts of this rank.
        trained: Share of the weights that gets gradients (1 without adapters).
        expert_tensors: Matrices that the experts of this rank consist of.

    """

    dense: Values
    experts: Values
    trained: float = 1.0
    expert_tensors: Any = 0


def layer_weights(
    model: ModelSpec, job: TrainingJob, kind: LayerKind, table: LayoutTable
) -> RankWeights:
    """Return the weights of a layer of a kind on one rank."""
    weights = layer_parameters(model, kind)
    tp = table.tensor_parallel
    cut = weights.query_and_output_matrices + weights.ffn_matrices + weights.sharded_vectors
    whole = weights.latent_matrices + weights.router + weights.replicated_vectors
    key_value = weights.key_value_matrices / np.minimum(tp, model.num_kv_heads)
    experts = weights.expert_parameters / (table.expert_parallel * table.expert_tensor_parallel)
    rank = job.lora_rank
    # Adapters of rank r beside an n x k weight train r (n + k) of its n k weights.
    share = 1.0 if rank is None else min(1.0, 2 * rank / model.hidden_size)
    num_experts = model.moe.num_experts if model.moe is not None and kind.has_experts else 0
    matrices = (3 if model.gated_ffn else 2) * num_experts
    return RankWeights(
        dense=cut / tp + key_value + whole,
        experts=experts,
        trained=share,
        expert_tensors=matrices // table.expert_parallel,
    )


def embedding_weights(model: ModelSpec, job: TrainingJob, table: LayoutTable) -> RankWeights:
    """Return the weights before the first layer on one rank."""
    rows = padded_rows(model, job.target, table.tensor_parallel)
    rest = embedding_parameters(model) - model.vocab_size * model.hidden_size
    return RankWeights(
        dense=rows * model.hidden_size / table.tensor_parallel + rest,
        experts=np.zeros(len(table)),
        trained=float(job.lora_rank is None),
    )


def head_weights(model: ModelSpec, job: TrainingJob, table: LayoutTable) -> RankWeights:
    """Return the weights after the last layer; a tied head is its own only across a pipeline."""
    rows = padded_rows(model, job.target, table.tensor_parallel)
    matrix = rows * model.hidden_size / table.tensor_parallel
    own = np.where(table.pipeline_parallel > 1, matrix, 0.0) if model.tied_embeddings else matrix
    norm = head_parameters(model) - (
        0 if model.tied_embeddings else model.vocab_size * model.hidden_size
    )
    return RankWeights(
        dense=own + norm, experts=np.zeros(len(table)), trained=float(job.lora_rank is None)
    )
