"""Families whose layers route tokens to experts."""

from dataclasses import replace

from costmodels.config_keys import ConfigKeys
from costmodels.hf_families.decoder import Habits, decoder, with_window
from costmodels.hf_families.dense import qwen2, qwen3
from costmodels.model import LatentAttention, MixtureOfExperts, ModelSpec


def mixtral(keys: ConfigKeys) -> ModelSpec:
    """Mixtral: every block is experts of the config's feed-forward width."""
    spec = decoder(keys, Habits(states_kv_heads=True, attention_bias=None, rope_theta=1e6))
    moe = MixtureOfExperts(
        num_experts=keys.count("num_local_experts", "num_experts"),
        experts_per_token=keys.count("num_experts_per_tok"),
        ffn_hidden_size=spec.ffn_hidden_size,
        balance_loss=keys.number("router_aux_loss_coef", default=0.0, or_zero=True),
    )
    return with_window(keys, replace(spec, moe=moe), keys.optional_count("sliding_window"))


def qwen2_moe(keys: ConfigKeys) -> ModelSpec:
    """Qwen2-MoE: always-on experts behind a gate of their own."""
    spec = qwen2(keys)
    shared = keys.count("shared_expert_intermediate_size", least=0)
    moe = replace(
        _qwen_experts(keys, spec.num_layers),
        shared_ffn_hidden_size=shared,
        shared_gate=shared > 0,
    )
    return replace(spec, moe=moe)


def qwen3_moe(keys: ConfigKeys) -> ModelSpec:
    """Qwen3-MoE: Qwen3 with experts, no always-on ones."""
    spec = qwen3(keys)
    return replace(spec, moe=_qwen_experts(keys, spec.num_layers))


def _qwen_experts(keys: ConfigKeys, num_layers: int) -> MixtureOfExperts:
    keys.expect("decoder_sparse_step", 1, why="experts must stand in every layer after the dense")
    dense = keys.items("mlp_only_layers") or []
    if dense != list(range(len(dense))) or len(dense) > num_layers:
        raise ValueError(f"mlp_only_layers must be the leading layers 0, 1, ..., not {dense}")
    return MixtureOfExperts(
        num_experts=keys.count("num_experts", "num_local_experts"),
        experts_per_token=keys.count("num_experts_per_tok"),
        ffn_hidden_size=keys.count("moe_intermediate_size"),
        num_dense_layers=len(dense),
        normalize_weights=keys.flag("norm_topk_prob", default=False),
        balance_loss=keys.number("router_aux_loss_coef", default=0.0, or_zero=True),
    )


def gpt_oss(keys: ConfigKeys) -> ModelSpec:
    """gpt-oss: biases everywhere, attention sinks, every other layer with a window."""
    habits = Habits(
        states_kv_heads=True, states_head_dim=True, attention_bias=True, rope_theta=150000.0
    )
    spec = decoder(keys, habits)
    moe = MixtureOfExperts(
        num_experts=keys.count("num_local_experts", "num_experts"),
        experts_per_token=keys.count("num_experts_per_tok", "experts_per_token"),
        ffn_hidden_size=spec.ffn_hidden_size,
        router_bias=True,
        expert_bias=True,
    )
    spec = replace(spec, moe=moe, attention_sinks=True)
    return with_window(keys, spec, keys.optional_count("sliding_window"), period=2)


def deepseek(keys: ConfigKeys) -> ModelSpec:
    """DeepSeek-V2 and V3: latent attention, always-on experts, the first layers dense."""
    latent = LatentAttention(
        q_lora_rank=keys.optional_count("q_lora_rank"),
        kv_lora_rank=keys.count("kv_lora_rank"),
        qk_nope_head_dim=keys.count("qk_nope_head_dim"),
        qk_rope_head_dim=keys.count("qk_rope_head_dim", least=0),
        v_head_dim=keys.count("v_head_dim"),
    )
    keys.skip("qk_head_dim", "head_dim")  # follow from the five above
    spec = decoder(keys, Habits(), head_dim=latent.qk_head_dim)
    return replace(
        spec,
        num_kv_heads=spec.num_attention_heads,
        latent_attention=latent,
        moe=_deepseek_experts(keys, is_v3=spec.architecture == "deepseek_v3"),
        num_mtp_layers=keys.count("num_nextn_predict_layers", "num_mtp_layers", default=0, least=0),
    )


def _deepseek_experts(keys: ConfigKeys, *, is_v3: bool) -> MixtureOfExperts:
    keys.expect("moe_layer_freq", 1, why="experts must stand in every layer after the dense")
    width = keys.count("moe_intermediate_size")
    method = keys.text("topk_method", default="noaux_tc" if is_v3 else "greedy")
    groups, allowed = keys.count("n_group", default=1), keys.count("topk_group", default=1)
    is_limited = method != "greedy"  # plain top-k looks at all groups
    return MixtureOfExperts(
        num_experts=keys.count("n_routed_experts", "num_experts", "num_local_experts"),
        experts_per_token=keys.count("num_experts_per_tok"),
        ffn_hidden_size=width,
        shared_ffn_hidden_size=width * keys.count("n_shared_experts", default=0, least=0),
        num_dense_layers=keys.count("first_k_dense_replace", default=0, least=0),
        scoring=keys.text("scoring_func", default="sigmoid" if is_v3 else "softmax"),
        normalize_weights=keys.flag("norm_topk_prob", default=is_v3),
        routed_scaling=keys.number("routed_scaling_factor", default=2.5 if is_v3 else 1.0),
        correction_bias=method == "noaux_tc",
        num_groups=groups if is_limited else 1,
        groups_per_token=allowed if is_limited else 1,
        balance_loss=keys.number("aux_loss_alpha", default=0.0, or_zero=True),
    )
