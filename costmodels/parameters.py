"""How many weights a model has, part by part, and the FLOPs that they make per token.

One layer, with H hidden, A heads and G key-value heads of width D, F feed-forward width:

    attention      H * A * D (query) + 2 * H * G * D (key, value) + A * D * H (output)
    feed-forward   3 * H * F when gated, else 2 * H * F
    experts        num_experts times that with the experts' width, and H * num_experts to route

Parts are kept apart by how tensor parallelism treats them: matrices and their column biases are
cut, norms and row biases are whole on every rank. Tied weights count once. Multi-token-prediction
blocks and buffers (the routing bias that DeepSeek-V3 adjusts outside of training) do not count.

Sources: the models' own reports; checked to the last digit against `tests/golden/
param_counts.csv` (Hugging Face transformers on the meta device). FLOPs by the convention of
Narayanan et al. 2021 (arXiv:2104.04473, appendix): 6 per weight in a matrix product, attention
as a full square.
"""

from dataclasses import dataclass, fields, replace

from costmodels.model import LatentAttention, LayerKind, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParameters:
    """Weights of one layer.

    Attributes:
        query_and_output_matrices: Cut by heads over the tensor axis. With latent attention these
            are the up-projections and the output.
        key_value_matrices: Cut by key-value heads; copied where the axis is longer than these.
        latent_matrices: Down-projections of latent attention, whole on every rank, and what else
            is (`ModelSpec.whole_matrices`).
        ffn_matrices: The dense feed-forward block, or the always-on shared experts.
        expert_matrices: All routed experts together, over expert and expert-tensor parallelism.
        router: The router's matrix (and a shared expert's gate), whole on every rank.
        expert_vectors: Biases of all routed experts.
        sharded_vectors: Biases of column-parallel matrices and attention sinks.
        replicated_vectors: Norms, biases of row-parallel matrices and of the router.

    """

    query_and_output_matrices: int
    key_value_matrices: int
    latent_matrices: int = 0
    ffn_matrices: int
    expert_matrices: int = 0
    router: int = 0
    expert_vectors: int = 0
    sharded_vectors: int = 0
    replicated_vectors: int = 0

    @property
    def attention_matrices(self) -> int:
        """Every matrix of the attention block."""
        return self.query_and_output_matrices + self.key_value_matrices + self.latent_matrices

    @property
    def matrices(self) -> int:
        """Weights in matrix products, every expert counted."""
        return self.attention_matrices + self.ffn_matrices + self.expert_matrices + self.router

    @property
    def vectors(self) -> int:
        """Norms, biases and sinks."""
        return self.expert_vectors + self.sharded_vectors + self.replicated_vectors

    @property
    def expert_parameters(self) -> int:
        """Everything that expert parallelism spreads."""
        return self.expert_matrices + self.expert_vectors

    @property
    def total(self) -> int:
        """All weights of the layer."""
        return sum(getattr(self, part.name) for part in fields(self))


def layer_parameters(model: ModelSpec, kind: LayerKind) -> LayerParameters:
    """Count the weights of one layer.

    Args:
        model: The network.
        kind: What the layer is made of; its window does not matter here.

    """
    norms = model.norms_per_layer * _norm_parameters(model, model.hidden_size)
    parts = _add(_attention(model), _feed_forward(model, kind), replicated=norms)
    return replace(
        parts,
        latent_matrices=parts.latent_matrices + model.whole_matrices,
        replicated_vectors=parts.replicated_vectors + model.whole_vectors,
    )


def embedding_parameters(model: ModelSpec, vocab_size: int | None = None) -> int:
    """Weights before the first layer: word embedding, learned positions, embedding norm.

    Args:
        model: The network.
        vocab_size: Rows when padded; the model's own when left out.

    """
    rows = (vocab_size or model.vocab_size) + model.num_position_embeddings
    norm = _norm_parameters(model, model.hidden_size) if model.embedding_norm else 0
    return rows * model.hidden_size + norm


def head_parameters(model: ModelSpec, vocab_size: int | None = None) -> int:
    """Weights after the last layer: final norm and output head; a tied head adds none.

    Args:
        model: The network.
        vocab_size: Rows when padded; the model's own when left out.

    """
    rows = vocab_size or model.vocab_size
    matrix = 0 if model.tied_embeddings else rows * model.hidden_size
    bias = rows if model.head_bias else 0
    return _norm_parameters(model, model.hidden_size) + matrix + bias


def num_parameters(model: ModelSpec) -> int:
    """Count all weights that training updates, tied ones once."""
    layers = sum(layer_parameters(model, kind).total for kind in model.layer_kinds)
    return embedding_parameters(model) + layers + head_parameters(model)


def num_active_parameters(model: ModelSpec) -> int:
    """Count the weights that one token meets: all but the routed experts that it does not visit."""
    layers = (layer_parameters(model, kind) for kind in model.layer_kinds)
    return num_parameters(model) - sum(_idle(model, layer.expert_parameters) for layer in layers)


def matmul_parameters(model: ModelSpec) -> int:
    """Active weights in matrix products: the output head counts, the input embedding does not."""
    layers = [layer_parameters(model, kind) for kind in model.layer_kinds]
    active = sum(layer.matrices - _idle(model, layer.expert_matrices) for layer in layers)
    return active + model.vocab_size * model.hidden_size


def model_flops_per_token(model: ModelSpec, seq_len: int) -> float:
    """FLOPs of forward and backward of one token, no recomputation.

        6 * matmul_parameters + 12 * layers * seq_len * heads * head_dim

    Attention counts as a full square, windows or not. Where keys are wider than values (latent
    attention), head_dim is their mean, since each enters one of the two products.

    Args:
        model: The network.
        seq_len: Tokens per sequence.

    """
    latent = model.latent_attention
    head_dim = (latent.qk_head_dim + latent.v_head_dim) / 2 if latent else model.head_dim
    attention = 12 * model.num_layers * seq_len * model.num_attention_heads * head_dim
    return 6 * matmul_parameters(model) + attention


def _idle(model: ModelSpec, expert_weights: int) -> int:
    """Weights of a layer's routed experts that one token does not visit."""
    if model.moe is None:
        return 0
    return (
        expert_weights
        // model.moe.num_experts
        * (model.moe.num_experts - model.moe.experts_per_token)
    )


def _norm_parameters(model: ModelSpec, width: int) -> int:
    per_channel = {"rmsnorm": 1, "layernorm": 2, "nonparametric-layernorm": 0}
    return per_channel[model.norm] * width


def _attention(model: ModelSpec) -> LayerParameters:
    if model.latent_attention is not None:
        return _latent_attention(model, model.latent_attention)
    hidden = model.hidden_size
    query = model.num_attention_heads * model.head_dim
    key_value = model.num_kv_heads * model.head_dim
    qk_norms = {"none": 0, "per-head": 2 * model.head_dim, "full": query + key_value}
    return LayerParameters(
        query_and_output_matrices=2 * hidden * query,
        key_value_matrices=2 * hidden * key_value,
        ffn_matrices=0,
        sharded_vectors=(query + 2 * key_value if model.qkv_bias else 0)
        + (model.num_attention_heads if model.attention_sinks else 0),
        replicated_vectors=qk_norms[model.qk_norm] + (hidden if model.attention_output_bias else 0),
    )


def _latent_attention(model: ModelSpec, latent: LatentAttention) -> LayerParameters:
    hidden, heads = model.hidden_size, model.num_attention_heads
    compressed = latent.kv_lora_rank + latent.qk_rope_head_dim
    up = latent.kv_lora_rank * heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    output = heads * latent.v_head_dim * hidden
    query_input = hidden if latent.q_lora_rank is None else latent.q_lora_rank
    down_ranks = compressed + (latent.q_lora_rank or 0)
    return LayerParameters(
        query_and_output_matrices=query_input * heads * latent.qk_head_dim + up + output,
        key_value_matrices=0,
        latent_matrices=hidden * down_ranks,
        ffn_matrices=0,
        replicated_vectors=latent.kv_lora_rank
        + (latent.q_lora_rank or 0)
        + (down_ranks if model.qkv_bias else 0)
        + (hidden if model.attention_output_bias else 0),
    )


def _feed_forward(model: ModelSpec, kind: LayerKind) -> LayerParameters:
    hidden, inputs = model.hidden_size, 2 if model.gated_ffn else 1
    moe = model.moe
    if moe is None or not kind.has_experts:
        width = model.ffn_hidden_size
        return LayerParameters(
            query_and_output_matrices=0,
            key_value_matrices=0,
            ffn_matrices=(inputs + 1) * hidden * width,
            sharded_vectors=inputs * width if model.ffn_bias else 0,
            replicated_vectors=hidden if model.ffn_bias else 0,
        )
    biases = moe.num_experts * (inputs * moe.ffn_hidden_size + hidden)
    return LayerParameters(
        query_and_output_matrices=0,
        key_value_matrices=0,
        ffn_matrices=(inputs + 1) * hidden * moe.shared_ffn_hidden_size,
        expert_matrices=moe.num_experts * (inputs + 1) * hidden * moe.ffn_hidden_size,
        router=hidden * (moe.num_experts + (1 if moe.shared_gate else 0)),
        expert_vectors=biases if moe.expert_bias else 0,
        replicated_vectors=moe.num_experts if moe.router_bias else 0,
    )


def _add(first: LayerParameters, second: LayerParameters, *, replicated: int) -> LayerParameters:
    sums = {
        part.name: getattr(first, part.name) + getattr(second, part.name)
        for part in fields(LayerParameters)
    }
    sums["replicated_vectors"] += replicated
    return LayerParameters(**sums)
