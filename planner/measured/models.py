"""The model of a measured run, from the shape columns of its row.

Columns are described with the table; blanks mean "not stated".
"""

from dataclasses import replace

from costmodels.model import LatentAttention, MixtureOfExperts, ModelSpec
from costmodels.parameters import num_parameters
from planner.measured.columns import Row, UnsupportedRowError, integer

# Published shapes of latent attention (DeepSeek-V2, arXiv:2405.04434; V2-Lite has no query
# compression). A row gives its parameter count, which tells the two apart.
LATENT = LatentAttention(
    q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
)
LATENT_ATTENTIONS = (LATENT, replace(LATENT, q_lora_rank=None))


def read_model_columns(row: Row) -> ModelSpec:
    """Build a model from a row's shape columns."""
    attention = row["attention"]
    if attention not in ("mha", "gqa", "mla"):
        raise UnsupportedRowError(f"attention {attention or 'not stated'}: not a transformer here")
    experts = integer(row, "experts", 0)
    hidden = integer(row, "hidden")
    width = integer(row, "ffn_hidden", 0) or integer(row, "moe_ffn_hidden")
    gated = row["ffn_type"] in ("swiglu", "geglu")
    with_biases = row["ffn_type"] in ("gelu", "relu")
    head_dim = integer(row, "head_dim", hidden // max(1, integer(row, "heads")))
    model = ModelSpec(
        name=row["model"] or "unnamed",
        architecture="llama" if gated else "gpt2",
        hidden_size=hidden,
        num_layers=integer(row, "layers"),
        num_attention_heads=integer(row, "heads"),
        num_kv_heads=integer(row, "kv_heads"),
        head_dim=head_dim,
        ffn_hidden_size=width,
        vocab_size=integer(row, "vocab"),
        training_seq_len=integer(row, "seq_len"),
        gated_ffn=gated,
        activation="silu" if gated else "gelu",
        norm="rmsnorm" if gated else "layernorm",
        tied_embeddings=row["tied_embeddings"] == "1",
        qkv_bias=with_biases,
        attention_output_bias=with_biases,
        ffn_bias=with_biases,
        moe=_experts(row, experts) if experts else None,
    )
    return _with_latent_attention(model, row) if attention == "mla" else model


def _experts(row: Row, experts: int) -> MixtureOfExperts:
    width = integer(row, "moe_ffn_hidden")
    return MixtureOfExperts(
        num_experts=experts,
        experts_per_token=integer(row, "top_k"),
        ffn_hidden_size=width,
        shared_ffn_hidden_size=width * integer(row, "shared_experts", 0),
        num_dense_layers=integer(row, "dense_layers", 0),
    )


def _with_latent_attention(model: ModelSpec, row: Row) -> ModelSpec:
    stated = float(row["params_b"] or 0) * 1e9
    candidates = [replace(model, latent_attention=latent) for latent in LATENT_ATTENTIONS]
    return min(candidates, key=lambda candidate: abs(num_parameters(candidate) - stated))
