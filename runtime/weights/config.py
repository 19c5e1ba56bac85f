"""A specification as the `config.json` of Hugging Face: the reader's inverse, checked against it.

Written for the families that the runtime trains; what is read back must be the same model.
"""

import json
from collections.abc import Callable

from costmodels.hf_config import spec_from_hf_config
from costmodels.model import ModelSpec
from runtime.models.same import differences

Config = dict[str, object]

_CLASSES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def hf_config(spec: ModelSpec, dtype: str) -> Config:
    """Return the config of a model.

    Args:
        spec: The model.
        dtype: Of its weights, as in "bfloat16".

    Raises:
        ValueError: The family has no way to say what the model is.

    """
    if spec.architecture not in _CLASSES:
        raise ValueError(
            f"{spec.name}: no config is written for architecture {spec.architecture!r}; there are "
            f"{', '.join(sorted(_CLASSES))}"
        )
    config: Config = {
        "architectures": [_CLASSES[spec.architecture]],
        "model_type": spec.architecture,
        "torch_dtype": dtype,
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": spec.tied_embeddings,
    }
    config |= _gpt2(spec) if spec.architecture == "gpt2" else _decoder(spec)
    there = spec_from_hf_config(config, name=spec.name, source="the config that was written")
    if differing := differences(there, spec):
        raise ValueError(
            f"{spec.name} is no plain {spec.architecture}: as a config, {differing}; take the "
            "config of the model it came from (--like)"
        )
    return config


def _gpt2(spec: ModelSpec) -> Config:
    return {
        "n_embd": spec.hidden_size,
        "n_head": spec.num_attention_heads,
        "n_layer": spec.num_layers,
        "n_inner": spec.ffn_hidden_size,
        "n_positions": spec.num_position_embeddings,
        "activation_function": spec.activation,
        "layer_norm_epsilon": spec.norm_epsilon,
    }


def _decoder(spec: ModelSpec) -> Config:
    config: Config = {
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.ffn_hidden_size,
        "max_position_embeddings": spec.training_seq_len,
        "hidden_act": spec.activation,
        "rms_norm_eps": spec.norm_epsilon,
        "rope_theta": spec.rope_theta,
    }
    if spec.rope_scaling:
        config["rope_scaling"] = {key: _unpacked(value) for key, value in spec.rope_scaling}
    if spec.window is not None:
        config |= {"sliding_window": spec.window, "use_sliding_window": True}
    add = _FAMILIES.get(spec.architecture)
    return config | (add(spec) if add else {})


def _unpacked(value: float | str) -> object:
    """Return lists and tables that the specification keeps as JSON text."""
    is_text = isinstance(value, str) and value[:1] in ("[", "{", "t", "f", "n")
    try:
        return json.loads(str(value)) if is_text else value
    except ValueError:
        return value


def _llama(spec: ModelSpec) -> Config:
    return {"attention_bias": spec.qkv_bias, "mlp_bias": spec.ffn_bias}


def _mixtral(spec: ModelSpec) -> Config:
    assert spec.moe is not None
    return {
        "num_local_experts": spec.moe.num_experts,
        "num_experts_per_tok": spec.moe.experts_per_token,
        "router_aux_loss_coef": spec.moe.balance_loss,
    }


def _qwen_moe(spec: ModelSpec) -> Config:
    moe = spec.moe
    assert moe is not None
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.ffn_hidden_size,
        "shared_expert_intermediate_size": moe.shared_ffn_hidden_size,
        "mlp_only_layers": list(range(moe.num_dense_layers)),
        "norm_topk_prob": moe.normalize_weights,
        "router_aux_loss_coef": moe.balance_loss,
        "decoder_sparse_step": 1,
    }


def _qwen3_moe(spec: ModelSpec) -> Config:
    config = _qwen_moe(spec)
    del config["shared_expert_intermediate_size"]
    return config


def _deepseek(spec: ModelSpec) -> Config:
    moe, latent = spec.moe, spec.latent_attention
    assert moe is not None
    assert latent is not None
    is_v3 = spec.architecture == "deepseek_v3"
    method = "noaux_tc" if is_v3 else "greedy" if moe.num_groups == 1 else "group_limited_greedy"
    return {
        "attention_bias": spec.qkv_bias,
        "q_lora_rank": latent.q_lora_rank,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_nope_head_dim": latent.qk_nope_head_dim,
        "qk_rope_head_dim": latent.qk_rope_head_dim,
        "v_head_dim": latent.v_head_dim,
        "head_dim": latent.qk_rope_head_dim,  # what transformers computes rotary tables for
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.ffn_hidden_size,
        "n_shared_experts": moe.shared_ffn_hidden_size // moe.ffn_hidden_size,
        "first_k_dense_replace": moe.num_dense_layers,
        "moe_layer_freq": 1,
        "scoring_func": moe.scoring,
        "topk_method": method,
        "norm_topk_prob": moe.normalize_weights,
        "routed_scaling_factor": moe.routed_scaling,
        "n_group": moe.num_groups,
        "topk_group": moe.groups_per_token,
        "num_nextn_predict_layers": 0,  # blocks for further tokens are not trained here
    }


_FAMILIES: dict[str, Callable[[ModelSpec], Config]] = {
    "llama": _llama,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen_moe,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}
