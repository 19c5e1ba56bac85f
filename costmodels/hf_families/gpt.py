"""GPT-2 and its descendants: layer norm, two matrices per block, biases throughout."""

from dataclasses import replace

from costmodels.config_keys import ConfigKeys
from costmodels.hf_families.decoder import Habits, derived_head_dim, read_rope
from costmodels.model import ModelSpec


def gpt2(keys: ConfigKeys) -> ModelSpec:
    """GPT-2 and GPT-3: learned positions."""
    positions = keys.count("n_positions", "max_position_embeddings")
    hidden = keys.count("n_embd", "hidden_size")
    return _biased_decoder(
        keys,
        hidden=hidden,
        heads=keys.count("n_head", "num_attention_heads"),
        num_layers=keys.count("n_layer", "num_hidden_layers"),
        ffn_hidden_size=keys.count("n_inner", default=4 * hidden),
        training_seq_len=positions,
        num_position_embeddings=positions,
        activation=keys.text("activation_function", default="gelu_new"),
        rope_theta=None,
    )


def bloom(keys: ConfigKeys) -> ModelSpec:
    """BLOOM: ALiBi, and a norm after the embedding."""
    hidden = keys.count("hidden_size", "n_embed")
    return _biased_decoder(
        keys,
        hidden=hidden,
        heads=keys.count("n_head", "num_attention_heads"),
        num_layers=keys.count("n_layer", "num_hidden_layers"),
        ffn_hidden_size=4 * hidden,
        training_seq_len=keys.count("seq_length", default=2048),  # that of its own training
        embedding_norm=True,
        rope_theta=None,
    )


def gpt_neox(keys: ConfigKeys) -> ModelSpec:
    """GPT-NeoX and Pythia: rotary positions on a part of each head, parallel blocks."""
    rope = read_rope(keys, Habits(rope_fraction=0.25))
    spec = _biased_decoder(
        keys,
        hidden=keys.count("hidden_size"),
        heads=keys.count("num_attention_heads"),
        num_layers=keys.count("num_hidden_layers"),
        ffn_hidden_size=keys.count("intermediate_size"),
        training_seq_len=keys.count("max_position_embeddings"),
        activation=keys.text("hidden_act", default="gelu"),
        tied=False,
        rope_theta=rope.theta,
    )
    bias = keys.flag("attention_bias", default=True)
    return replace(
        spec,
        parallel_block=keys.flag("use_parallel_residual", default=True),
        rope_fraction=rope.fraction,
        rope_scaling=rope.scaling,
        qkv_bias=bias,
        attention_output_bias=bias,
    )


def falcon(keys: ConfigKeys) -> ModelSpec:
    """Falcon: parallel blocks, shared keys and values, no biases beside the norms."""
    hidden = keys.count("hidden_size", "n_embed")
    heads = keys.count("num_attention_heads", "n_head")
    is_new = keys.flag("new_decoder_architecture", default=False)
    is_parallel = keys.flag("parallel_attn", default=True) or is_new
    multi_query = keys.flag("multi_query", default=True)
    kv_heads = keys.count("num_kv_heads", "n_head_kv", default=heads)
    norms = keys.count("num_ln_in_parallel_attn", default=2 if is_new else 1)
    rope = read_rope(keys, Habits())
    bias = keys.flag("bias", default=False)
    spec = _biased_decoder(
        keys,
        hidden=hidden,
        heads=heads,
        num_layers=keys.count("num_hidden_layers", "n_layer"),
        ffn_hidden_size=keys.count("ffn_hidden_size", default=4 * hidden),
        training_seq_len=keys.count("max_position_embeddings", default=2048),
        activation=keys.text("activation", default="gelu"),
        rope_theta=None if keys.flag("alibi", default=False) else rope.theta,
    )
    return replace(
        spec,
        num_kv_heads=kv_heads if is_new or not multi_query else 1,
        norms_per_layer=norms if is_new else 1 if is_parallel else 2,
        parallel_block=is_parallel,
        rope_scaling=rope.scaling,
        qkv_bias=bias,
        attention_output_bias=bias,
        ffn_bias=bias,
    )


def _biased_decoder(
    keys: ConfigKeys,
    *,
    hidden: int,
    heads: int,
    num_layers: int,
    ffn_hidden_size: int,
    training_seq_len: int,
    rope_theta: float | None,
    activation: str = "gelu",
    tied: bool = True,
    num_position_embeddings: int = 0,
    embedding_norm: bool = False,
) -> ModelSpec:
    """Read what GPT-2 and its descendants share: layer norm, two matrices, biases throughout."""
    return ModelSpec(
        name="",
        architecture=keys.text("model_type"),
        hidden_size=hidden,
        num_layers=num_layers,
        num_attention_heads=heads,
        num_kv_heads=heads,
        head_dim=derived_head_dim(hidden, heads),
        ffn_hidden_size=ffn_hidden_size,
        vocab_size=keys.count("vocab_size"),
        training_seq_len=training_seq_len,
        gated_ffn=False,
        activation=activation,
        norm="layernorm",
        norm_epsilon=keys.number("layer_norm_epsilon", "layer_norm_eps", default=1e-5),
        tied_embeddings=keys.flag("tie_word_embeddings", default=tied),
        num_position_embeddings=num_position_embeddings,
        embedding_norm=embedding_norm,
        qkv_bias=True,
        attention_output_bias=True,
        ffn_bias=True,
        rope_theta=rope_theta,
    )
