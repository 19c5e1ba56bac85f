"""Rotary position embeddings as Llama has them (halves of a head rotate against each other).

    angle[s, i] = position[s] * theta ** (-2 i / D)         i in 0 .. D/2 - 1
    rotate(x)   = x * cos + cat(-x[D/2:], x[:D/2]) * sin

Source: Su et al., "RoFormer", arXiv:2104.09864, section 3.2; the frequency scaling of Llama 3.1 is
that of its public configuration (`rope_type: llama3`).

Shapes: B sequences, S tokens, A heads, D width of a head.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def inverse_frequencies(
    head_dim: int, theta: float, scaling: Mapping[str, float | int | str]
) -> Tensor:
    """Return the angular frequency of each pair of a head, fp32 [D/2] on the CPU.

    Raises:
        ValueError: The scaling is of a kind that is not built in.

    """
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    base = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if kind == "linear":
        base = [f / float(scaling["factor"]) for f in base]
    elif kind == "llama3":
        base = [_llama3_frequency(f, scaling) for f in base]
    elif kind != "default":
        raise ValueError(
            f"rope_scaling of type {kind!r} is not built in; there are default, linear, llama3"
        )
    # On the CPU even inside `torch.device("meta")`: lowering keeps constants, not weights.
    return torch.tensor(base, dtype=torch.float32, device="cpu")


def _llama3_frequency(frequency: float, scaling: Mapping[str, float | int | str]) -> float:
    """Stretch long wavelengths by `factor`, keep short ones, blend between."""
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = float(scaling["original_max_position_embeddings"]) * frequency / (2 * math.pi)
    if turns < low:
        return frequency / factor
    if turns > high:
        return frequency
    blend = (turns - low) / (high - low)
    return (1 - blend) * frequency / factor + blend * frequency


def tables(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [B, 1, S, D] of every position, computed in fp32."""
    angles = positions[:, None, :, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads turned by their positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
