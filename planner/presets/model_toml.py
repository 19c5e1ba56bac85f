"""Model TOML: a network of one's own, written with the field names of ModelSpec.

    name = "mine"
    hidden_size = 4096
    num_layers = 32
    num_attention_heads = 32
    num_kv_heads = 8             # left out: as many as heads
    head_dim = 128               # left out: hidden_size / num_attention_heads
    ffn_hidden_size = 14336
    vocab_size = 128256
    training_seq_len = 8192

    [moe]                        # MixtureOfExperts
    num_experts = 64
    experts_per_token = 8
    ffn_hidden_size = 1024

`[latent_attention]` takes the fields of LatentAttention, `[rope_scaling]` the pairs of a config's
rope_scaling. A model with `num_position_embeddings` has no rotary positions unless `rope_theta` is
given; `rope_theta = 0` means none (ALiBi). Everything else has ModelSpec's default, which is
Llama. Unknown keys are refused.
"""

import tomllib

from costmodels.hf_families.decoder import derived_head_dim
from costmodels.model import ModelSpec
from planner.codec import decode


def spec_from_toml(text: str, *, name: str, source: str) -> ModelSpec:
    """Read a model TOML.

    Args:
        text: The file's content.
        name: The model's name where the file has none.
        source: Where the text came from, for messages.

    Raises:
        ValueError: No TOML, an unknown or missing key, or a senseless value.

    """
    try:
        table = {"name": name, "architecture": "llama"} | tomllib.loads(text)
        heads = table.get("num_attention_heads")
        hidden = table.get("hidden_size")
        if isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
            table.setdefault("num_kv_heads", heads)
            if "head_dim" not in table:
                table["head_dim"] = derived_head_dim(hidden, heads)
        if table.get("rope_theta", 0 if "num_position_embeddings" in table else None) == 0:
            table["rope_theta"] = None  # TOML has no null
        scaling = table.get("rope_scaling")
        if isinstance(scaling, dict):
            table["rope_scaling"] = [list(pair) for pair in sorted(scaling.items())]
        return decode(ModelSpec, table, "model")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source}: {error}") from error
