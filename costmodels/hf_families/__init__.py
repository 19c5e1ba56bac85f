"""Readers of Hugging Face families: one function per `model_type`, listed in `FAMILIES`.

A family function says what its architecture adds to the common decoder. To add one, write it and
list it here; `tests/costmodels/test_hf_config.py` compares it with transformers.
"""

from collections.abc import Callable, Mapping

from costmodels.config_keys import ConfigKeys
from costmodels.hf_families import dense, experts, gpt
from costmodels.model import ModelSpec

Family = Callable[[ConfigKeys], ModelSpec]

FAMILIES: Mapping[str, Family] = {
    "bloom": gpt.bloom,
    "deepseek_v2": experts.deepseek,
    "deepseek_v3": experts.deepseek,
    "falcon": gpt.falcon,
    "gemma": dense.gemma,
    "gemma2": dense.gemma2,
    "gpt2": gpt.gpt2,
    "gpt_neox": gpt.gpt_neox,
    "gpt_oss": experts.gpt_oss,
    "llama": dense.llama,
    "mistral": dense.mistral,
    "mixtral": experts.mixtral,
    "olmo": dense.olmo,
    "olmo2": dense.olmo2,
    "phi3": dense.phi3,
    "qwen2": dense.qwen2,
    "qwen2_moe": experts.qwen2_moe,
    "qwen3": dense.qwen3,
    "qwen3_moe": experts.qwen3_moe,
}
