"""The project's own decoders, with the parameter names of Hugging Face's.

`build_model` makes the module of a `ModelSpec`; its parameters usually lie on the meta device and
receive values after lowering, rank by rank. Blocks of multi-token prediction are left out, here as
in all counts of parameters: the main model trains without them.
"""

import torch
from torch import nn

from costmodels.model import ModelSpec
from runtime.models.gpt2 import Gpt2
from runtime.models.llama import Llama

_FAMILIES = {
    "llama": Llama,
    "mistral": Llama,
    "qwen2": Llama,
    "qwen3": Llama,
    "mixtral": Llama,
    "qwen2_moe": Llama,
    "qwen3_moe": Llama,
    "deepseek_v2": Llama,
    "deepseek_v3": Llama,
    "gpt2": Gpt2,
}

_NORMS_PER_LAYER = 2


def build_model(
    spec: ModelSpec,
    *,
    seq_len: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "meta",
) -> nn.Module:
    """Return the decoder of a specification: `(input_ids, position_ids) -> logits`.

    Args:
        spec: A model of the Llama or GPT-2 family.
        seq_len: Tokens per sequence of the job; longer than a window or a table of positions,
            the model is refused.
        dtype: Of the parameters.
        device: Of the parameters; constants always lie on the CPU.

    Raises:
        ValueError: The runtime has no module for the model, with what is missing.

    """
    family = _FAMILIES.get(spec.architecture)
    if family is None:
        raise ValueError(
            f"{spec.name}: the native runtime has no module for architecture "
            f"{spec.architecture!r}; it has {', '.join(sorted(_FAMILIES))}"
        )
    for feature, present in _unsupported(spec, seq_len).items():
        if present:
            raise ValueError(f"{spec.name}: the native runtime does not train {feature}")
    with torch.device(device):
        model = family(spec)
    # Buffers keep their own: frequencies and corrections are fp32.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _unsupported(spec: ModelSpec, seq_len: int) -> dict[str, bool]:
    """Return what no module here can express, and whether the model asks for it."""
    positions = spec.num_position_embeddings
    return {
        "biases of experts or routers": spec.moe is not None
        and (spec.moe.expert_bias or spec.moe.router_bias),
        "experts beside learned positions": spec.moe is not None and positions > 0,
        "parallel blocks": spec.parallel_block,
        f"{spec.norms_per_layer} norms per layer": spec.norms_per_layer != _NORMS_PER_LAYER,
        "a norm after the embedding": spec.embedding_norm,
        "attention sinks": spec.attention_sinks,
        "a bias in the output head": spec.head_bias,
        f"query and key norms of kind {spec.qk_norm!r}": spec.qk_norm not in ("none", "per-head"),
        f"rotary embeddings on {spec.rope_fraction:g} of a head": spec.rope_fraction != 1.0,
        f"sequences of {seq_len} tokens with a window of {spec.window}": (
            spec.window is not None and seq_len > spec.window
        ),
        f"sequences of {seq_len} tokens with {positions} learned positions": (
            0 < positions < seq_len
        ),
    }
