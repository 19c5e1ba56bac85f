"""What Llama and its many relatives share: one reader, and the habits in which they differ."""

import json
from dataclasses import dataclass, replace

from costmodels.config_keys import ConfigKeys
from costmodels.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """What a family means where its configs are silent."""

    states_kv_heads: bool = False  # its class would make up a number, so the config has to say
    states_head_dim: bool = False
    tied: bool = False
    rope_theta: float = 10000.0
    rope_fraction: float = 1.0
    attention_bias: bool | None = False  # None: biases are none of the config's business
    has_mlp_bias: bool = False
    activation: str = "silu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions: base, share of a head that turns, scaling as key-value pairs."""

    theta: float
    fraction: float
    scaling: tuple[tuple[str, float | int | str], ...]


def decoder(keys: ConfigKeys, habits: Habits, *, head_dim: int | None = None) -> ModelSpec:
    """Read what the families share; the model's name is left empty.

    Args:
        keys: The config.
        habits: What silence means in this family.
        head_dim: Width of a head where the family states it in its own way.

    Raises:
        ValueError: A key is missing or senseless.

    """
    hidden = keys.count("hidden_size")
    heads = keys.count("num_attention_heads")
    kv_heads = keys.count("num_key_value_heads", default=None if habits.states_kv_heads else heads)
    bias = _bias(keys, "attention_bias", default=habits.attention_bias)
    rope = read_rope(keys, habits)
    return ModelSpec(
        name="",
        architecture=keys.text("model_type"),
        hidden_size=hidden,
        num_layers=keys.count("num_hidden_layers"),
        num_attention_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim or _head_dim(keys, hidden, heads, stated=habits.states_head_dim),
        ffn_hidden_size=keys.count("intermediate_size"),
        vocab_size=keys.count("vocab_size"),
        training_seq_len=keys.count("max_position_embeddings"),
        activation=keys.text("hidden_act", default=habits.activation),
        norm_epsilon=keys.number("rms_norm_eps", default=1e-6),
        tied_embeddings=keys.flag("tie_word_embeddings", default=habits.tied),
        qkv_bias=bias,
        attention_output_bias=bias,
        ffn_bias=_bias(keys, "mlp_bias", default=False if habits.has_mlp_bias else None),
        rope_theta=rope.theta,
        rope_fraction=rope.fraction,
        rope_scaling=rope.scaling,
    )


def _bias(keys: ConfigKeys, name: str, *, default: bool | None) -> bool:
    if default is None:
        keys.expect(name, False, why="this family has no such biases")
        return False
    return keys.flag(name, default=default)


def _head_dim(keys: ConfigKeys, hidden: int, heads: int, *, stated: bool) -> int:
    head_dim = keys.optional_count("head_dim")
    if head_dim is not None:
        return head_dim
    if stated:
        raise ValueError("the key head_dim is missing; this family does not derive it")
    return derived_head_dim(hidden, heads)


def derived_head_dim(hidden: int, heads: int) -> int:
    """Return hidden / heads, refused where it is no whole number."""
    if hidden % heads:
        raise ValueError(
            f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, "
            "and no head_dim is given"
        )
    return hidden // heads


def read_rope(keys: ConfigKeys, habits: Habits) -> Rope:
    """Return rotary positions, from today's `rope_parameters` or the keys that came before it."""
    parameters = keys.table("rope_parameters") or {}
    nested = ConfigKeys(parameters)
    theta = nested.number("rope_theta", default=habits.rope_theta)
    fraction = nested.number("partial_rotary_factor", default=habits.rope_fraction)
    scaling = dict(keys.table("rope_scaling") or parameters)
    for plain in ("rope_theta", "partial_rotary_factor"):
        scaling.pop(plain, None)
    if scaling.get("rope_type", scaling.get("type")) == "default":
        scaling = {}
    return Rope(
        theta=keys.number("rope_theta", "rotary_emb_base", default=theta),
        fraction=keys.number("partial_rotary_factor", "rotary_pct", default=fraction),
        scaling=tuple((key, _plain(value)) for key, value in sorted(scaling.items())),
    )


def _plain(value: object) -> float | str:
    """Return numbers as floats, so that a plan reads back what it wrote; the rest as JSON text."""
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return json.dumps(value)


def with_window(
    keys: ConfigKeys, spec: ModelSpec, window: int | None, period: int = 1
) -> ModelSpec:
    """Set the sliding windows of a model.

    Args:
        keys: The config; a `layer_types` list, where there is one, has to say the same.
        spec: The model so far.
        window: Tokens that a layer sees; None is all.
        period: Of so many layers all but the last use the window; 1 means all do.

    Raises:
        ValueError: `layer_types` is another pattern.

    """
    spec = replace(spec, window=window, window_period=period if window else 1)
    stated = keys.items("layer_types")
    kinds = [
        "full_attention" if kind.window is None else "sliding_attention"
        for kind in spec.layer_kinds
    ]
    if stated is not None and stated != kinds:
        layer = next((i for i, (a, b) in enumerate(zip(stated, kinds, strict=False)) if a != b), 0)
        raise ValueError(
            f"layer_types ({len(stated)} entries) is not the pattern that is modelled for this "
            f"family ({len(kinds)} layers); they differ from layer {layer} on"
        )
    return spec
