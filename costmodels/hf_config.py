"""Hugging Face configs: the object of a `config.json` to a ModelSpec.

`hf_families.FAMILIES` lists what is read. Where a config is silent, the default of Hugging Face's
own class holds if it follows from the other keys (key-value heads equal heads, a head is
hidden / heads); sizes that the class would make up are asked for instead.

Source: configuration and modeling files of Hugging Face transformers 5.24, checked against it by
`tests/costmodels/test_hf_config.py`.
"""

import difflib
from collections.abc import Mapping
from dataclasses import replace

from costmodels.config_keys import ConfigKeys
from costmodels.hf_families import FAMILIES, Family
from costmodels.model import ModelSpec


def spec_from_hf_config(config: Mapping[str, object], *, name: str, source: str) -> ModelSpec:
    """Read a config.

    Args:
        config: The object of a `config.json`.
        name: What the model shall be called.
        source: Where the config came from, for messages.

    Raises:
        ValueError: The family is not known, a key is missing or senseless, or a key that is not
            known speaks of the model's shape; the message starts with `source`.

    """
    keys = ConfigKeys(config)
    try:
        spec = replace(_family(keys.text("model_type"))(keys), name=name)
        for switch in ("is_encoder_decoder", "add_cross_attention"):
            keys.expect(switch, False, why="only decoders without cross-attention are read")
        keys.expect("pruned_heads", {}, why="layers must have the same heads")
        keys.refuse_unread()
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    return spec


def _family(model_type: str) -> Family:
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    close = difflib.get_close_matches(model_type, FAMILIES, n=1)
    hint = f" (nearest: {close[0]})" if close else ""
    known = ", ".join(sorted(FAMILIES))
    raise ValueError(f"model_type {model_type!r} is not known{hint}; known: {known}")
