"""Families of the Llama line with one feed-forward block per layer."""

from dataclasses import replace

from costmodels.config_keys import ConfigKeys
from costmodels.hf_families.decoder import Habits, decoder, with_window
from costmodels.model import ModelSpec


def llama(keys: ConfigKeys) -> ModelSpec:
    """Llama 1 to 3, Yi, DeepSeek-LLM and all that load as Llama."""
    return decoder(keys, Habits(has_mlp_bias=True))


def mistral(keys: ConfigKeys) -> ModelSpec:
    """Mistral: a sliding window where the config has one."""
    spec = decoder(keys, Habits(states_kv_heads=True, attention_bias=None))
    return with_window(keys, spec, keys.optional_count("sliding_window"))


def qwen2(keys: ConfigKeys) -> ModelSpec:
    """Qwen2 and 2.5: biases on queries, keys and values."""
    spec = decoder(keys, Habits(states_kv_heads=True, attention_bias=None))
    spec = replace(spec, qkv_bias=keys.flag("qkv_bias", default=True))
    return with_window(keys, spec, _qwen_window(keys, spec.num_layers))


def qwen3(keys: ConfigKeys) -> ModelSpec:
    """Qwen3: norms on every head of queries and keys."""
    spec = decoder(keys, Habits(states_kv_heads=True, states_head_dim=True))
    spec = replace(spec, qk_norm="per-head")
    return with_window(keys, spec, _qwen_window(keys, spec.num_layers))


def _qwen_window(keys: ConfigKeys, num_layers: int) -> int | None:
    window = keys.optional_count("sliding_window", least=0)
    first = keys.count("max_window_layers", default=0, least=0)
    if not keys.flag("use_sliding_window", default=False) or first >= num_layers:
        return None
    if first > 0:
        raise ValueError(
            f"max_window_layers {first} of {num_layers} layers: windows in the last layers only "
            "are not modelled; 0 or all layers are"
        )
    return window or None


def gemma(keys: ConfigKeys) -> ModelSpec:
    """Gemma: a tied head and wide heads."""
    habits = Habits(
        states_kv_heads=True, states_head_dim=True, tied=True, activation="gelu_pytorch_tanh"
    )
    spec = decoder(keys, habits)
    return replace(spec, activation=keys.text("hidden_activation", default=spec.activation))


def gemma2(keys: ConfigKeys) -> ModelSpec:
    """Gemma 2: four norms per layer, every other layer with a window."""
    spec = replace(gemma(keys), norms_per_layer=4)
    window = keys.optional_count("sliding_window", "sliding_window_size")
    return with_window(keys, spec, window, period=2)


def phi3(keys: ConfigKeys) -> ModelSpec:
    """Phi-3: fused projections, which count the same."""
    spec = decoder(keys, Habits(attention_bias=None))
    return with_window(keys, spec, keys.optional_count("sliding_window"))


def olmo(keys: ConfigKeys) -> ModelSpec:
    """OLMo: norms without weights."""
    spec = decoder(keys, Habits())
    return replace(spec, norm="nonparametric-layernorm", norm_epsilon=1e-5)


def olmo2(keys: ConfigKeys) -> ModelSpec:
    """OLMo 2: norms over all queries and all keys."""
    return replace(decoder(keys, Habits()), qk_norm="full")
