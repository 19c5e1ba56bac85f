"""Counts against hand work; the published totals are in tests/planner/test_presets.py."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.model import LatentAttention, LayerKind, MixtureOfExperts, ModelSpec
from costmodels.parameters import (
    embedding_parameters,
    head_parameters,
    layer_parameters,
    matmul_parameters,
    model_flops_per_token,
    num_active_parameters,
    num_parameters,
)

DENSE = LayerKind(window=None, has_experts=False)
EXPERTS = LayerKind(window=None, has_experts=True)


def llama(**changes: object) -> ModelSpec:
    base = ModelSpec(
        name="hand",
        architecture="llama",
        hidden_size=8,
        num_layers=3,
        num_attention_heads=4,
        num_kv_heads=2,
        head_dim=2,
        ffn_hidden_size=16,
        vocab_size=100,
        training_seq_len=32,
    )
    return replace(base, **changes)


def test_dense_layer_is_counted_part_by_part() -> None:
    layer = layer_parameters(llama(), DENSE)
    assert layer.query_and_output_matrices == 2 * 8 * 8
    assert layer.key_value_matrices == 2 * 8 * 4
    assert layer.attention_matrices == 192
    assert layer.ffn_matrices == 3 * 8 * 16
    assert layer.replicated_vectors == 2 * 8
    assert layer.sharded_vectors == layer.expert_parameters == layer.router == 0
    assert layer.total == 192 + 384 + 16


def test_biases_of_column_matrices_are_sharded_and_those_of_row_matrices_are_not() -> None:
    model = llama(qkv_bias=True, attention_output_bias=True, ffn_bias=True, gated_ffn=False)
    layer = layer_parameters(model, DENSE)
    assert layer.sharded_vectors == (8 + 2 * 4) + 16
    assert layer.replicated_vectors == 2 * 8 + 8 + 8


def test_gated_blocks_have_two_input_biases() -> None:
    plain = layer_parameters(llama(ffn_bias=True, gated_ffn=False), DENSE)
    gated = layer_parameters(llama(ffn_bias=True), DENSE)
    assert gated.sharded_vectors - plain.sharded_vectors == 16


def test_layer_norms_have_weights_and_biases_and_those_of_olmo_have_none() -> None:
    assert layer_parameters(llama(norm="layernorm"), DENSE).replicated_vectors == 2 * 2 * 8
    assert layer_parameters(llama(norm="nonparametric-layernorm"), DENSE).vectors == 0
    assert head_parameters(llama(norm="nonparametric-layernorm", tied_embeddings=True)) == 0


def test_query_and_key_norms_are_per_head_or_full_width() -> None:
    bare = layer_parameters(llama(), DENSE).replicated_vectors
    per_head = layer_parameters(llama(qk_norm="per-head"), DENSE).replicated_vectors
    full = layer_parameters(llama(qk_norm="full"), DENSE).replicated_vectors
    assert (per_head - bare, full - bare) == (2 * 2, 8 + 4)


def test_attention_sinks_are_one_number_per_head_and_shard_with_the_heads() -> None:
    assert layer_parameters(llama(attention_sinks=True), DENSE).sharded_vectors == 4


def test_latent_attention_keeps_its_down_projections_whole() -> None:
    latent = LatentAttention(
        q_lora_rank=6, kv_lora_rank=5, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=4
    )
    layer = layer_parameters(llama(latent_attention=latent, head_dim=5), DENSE)
    assert layer.latent_matrices == 8 * 6 + 8 * (5 + 2)
    query_up, kv_up, output = 6 * 4 * 5, 5 * 4 * (3 + 4), 4 * 4 * 8
    assert layer.query_and_output_matrices == query_up + kv_up + output
    assert layer.replicated_vectors == 2 * 8 + 6 + 5


def test_latent_attention_without_query_compression_projects_queries_directly() -> None:
    latent = LatentAttention(
        q_lora_rank=None, kv_lora_rank=5, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=4
    )
    layer = layer_parameters(llama(latent_attention=latent, head_dim=5), DENSE)
    assert layer.latent_matrices == 8 * 7
    assert layer.query_and_output_matrices == 8 * 4 * 5 + 5 * 4 * 7 + 4 * 4 * 8


def test_expert_layer_has_experts_in_place_of_the_dense_block() -> None:
    moe = MixtureOfExperts(
        num_experts=10,
        experts_per_token=2,
        ffn_hidden_size=4,
        shared_ffn_hidden_size=6,
        num_dense_layers=1,
        router_bias=True,
        expert_bias=True,
        shared_gate=True,
    )
    model = llama(moe=moe)
    layer = layer_parameters(model, EXPERTS)
    assert layer.expert_matrices == 10 * 3 * 8 * 4
    assert layer.ffn_matrices == 3 * 8 * 6
    assert layer.router == 8 * 10 + 8
    assert layer.expert_vectors == 10 * (4 + 4 + 8)
    assert layer.replicated_vectors == 2 * 8 + 10
    assert layer_parameters(model, DENSE).ffn_matrices == 3 * 8 * 16
    assert [kind.has_experts for kind in model.layer_kinds] == [False, True, True]


def test_active_parameters_leave_out_the_experts_that_a_token_does_not_visit() -> None:
    moe = MixtureOfExperts(num_experts=10, experts_per_token=2, ffn_hidden_size=4, expert_bias=True)
    model = llama(moe=moe)
    idle_per_layer = 8 * (3 * 8 * 4 + 2 * 4 + 8)
    assert num_parameters(model) - num_active_parameters(model) == 3 * idle_per_layer


def test_dense_models_are_all_active() -> None:
    assert num_active_parameters(llama()) == num_parameters(llama())


def test_padded_rows_add_to_embedding_and_head_and_not_to_the_model() -> None:
    model = llama(num_position_embeddings=32, embedding_norm=True, head_bias=True)
    assert embedding_parameters(model) == (100 + 32) * 8 + 8
    assert embedding_parameters(model, vocab_size=128) == (128 + 32) * 8 + 8
    assert head_parameters(model) == 8 + 100 * 8 + 100
    assert head_parameters(model, vocab_size=128) == 8 + 128 * 8 + 128


def test_tied_weights_count_once_in_the_total_and_once_in_matrix_products() -> None:
    tied = llama(tied_embeddings=True)
    assert num_parameters(llama()) - num_parameters(tied) == 100 * 8
    assert matmul_parameters(tied) == matmul_parameters(llama()) == 3 * (192 + 384) + 800


def test_flops_per_token_are_six_per_weight_and_a_full_square_of_attention() -> None:
    expected = 6 * (3 * 576 + 800) + 12 * 3 * 64 * 4 * 2
    assert model_flops_per_token(llama(), seq_len=64) == expected
    assert model_flops_per_token(llama(window=4), seq_len=64) == expected


def test_latent_attention_counts_key_and_value_widths_once_each() -> None:
    latent = LatentAttention(
        q_lora_rank=None, kv_lora_rank=5, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=4
    )
    model = llama(latent_attention=latent, head_dim=5)
    growth = model_flops_per_token(model, seq_len=65) - model_flops_per_token(model, seq_len=64)
    assert growth == 6 * 3 * 4 * (5 + 4)


@given(
    heads=st.sampled_from([2, 4, 8]),
    layers=st.integers(1, 6),
    dense=st.integers(0, 6),
    experts=st.integers(1, 8),
    chosen=st.integers(1, 8),
    tied=st.booleans(),
)
def test_parts_sum_to_the_whole(
    *, heads: int, layers: int, dense: int, experts: int, chosen: int, tied: bool
) -> None:
    moe = MixtureOfExperts(
        num_experts=experts,
        experts_per_token=min(chosen, experts),
        ffn_hidden_size=12,
        num_dense_layers=min(dense, layers),
    )
    model = llama(
        num_attention_heads=heads, num_layers=layers, moe=moe, tied_embeddings=tied, qkv_bias=True
    )
    parts = [layer_parameters(model, kind) for kind in model.layer_kinds]
    layer_total = sum(layer.matrices + layer.vectors for layer in parts)
    assert num_parameters(model) == (
        embedding_parameters(model) + layer_total + head_parameters(model)
    )
    assert matmul_parameters(model) <= num_active_parameters(model) + (800 if tied else 0)
    assert num_active_parameters(model) <= num_parameters(model)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1, not 0"),
        ({"num_kv_heads": 3}, "num_kv_heads must divide num_attention_heads 4, not 3"),
        ({"num_layers": 20_000}, "num_layers above 10000"),
        ({"norm": "batchnorm"}, "norm must be one of rmsnorm, layernorm"),
        ({"window": 0}, "window must be at least 1"),
        ({"qk_norm": "half"}, "qk_norm must be one of none, per-head, full"),
    ],
)
def test_sizes_that_no_network_has_are_refused(changes: dict[str, object], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        llama(**changes)


def test_experts_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="experts_per_token must be at most num_experts 4, not 8"):
        MixtureOfExperts(num_experts=4, experts_per_token=8, ffn_hidden_size=16)
    with pytest.raises(ValueError, match="num_groups must divide num_experts 10, not 4"):
        MixtureOfExperts(num_experts=10, experts_per_token=1, ffn_hidden_size=16, num_groups=4)
    moe = MixtureOfExperts(
        num_experts=4, experts_per_token=2, ffn_hidden_size=16, num_dense_layers=4
    )
    with pytest.raises(ValueError, match="num_dense_layers must be at most num_layers 3, not 4"):
        llama(moe=moe)
