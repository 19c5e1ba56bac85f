"""Rotary position embeddings as Llama has them (halves of a head rotate against each other).

    angle[s, i] = position[s] * theta ** (-2 i / D)         i in 0 .. D/2 - 1
    rotate(x)   = x * cos + cat(-x[D/2:], x[:D/2]) * sin

Source: Su et al., "RoFormer", arXiv:2104.09864, section 3.2; the frequency scaling of Llama 3.1 is
that of its public configuration (`rope_type: llama3`); YaRN: Peng et al., arXiv:2309.00071,
sections 3.2 to 3.4, with the two strengths of DeepSeek's published code.

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
    elif kind == "yarn":
        base = _yarn_frequencies(base, theta, scaling)
    elif kind != "default":
        raise ValueError(
            f"rope_scaling of type {kind!r} is not built in; there are default, linear, llama3, "
            "yarn"
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


def _yarn_frequencies(
    base: list[float], theta: float, scaling: Mapping[str, float | int | str]
) -> list[float]:
    """Stretch frequencies that turn seldom within the original length, keep those that turn often.

    A frequency turns n times in the original length at index `D ln(length / 2 pi n) / 2 ln theta`.
    """
    length = float(scaling["original_max_position_embeddings"])

    def index_of(turns: float) -> float:
        return len(base) * math.log(length / (turns * 2 * math.pi)) / math.log(theta)

    first = max(math.floor(index_of(float(scaling.get("beta_fast", 32)))), 0)
    last = min(math.ceil(index_of(float(scaling.get("beta_slow", 1)))), 2 * len(base) - 1)
    span = max(last - first, 1e-3)
    stretched = [min(max((i - first) / span, 0.0), 1.0) for i in range(len(base))]
    factor = float(scaling["factor"])
    return [f * (s / factor + 1 - s) for f, s in zip(base, stretched, strict=True)]


def magnitude(scaling: Mapping[str, float | int | str]) -> float:
    """Return what cosine and sine are multiplied by: YaRN sharpens attention over long contexts."""
    if scaling.get("rope_type", scaling.get("type")) != "yarn":
        return 1.0
    own, all_dims = float(scaling.get("mscale", 0)), float(scaling.get("mscale_all_dim", 0))
    if own and all_dims:
        return _yarn_growth(scaling, own) / _yarn_growth(scaling, all_dims)
    return _yarn_growth(scaling, 1.0)


def attention_scale(head_dim: int, scaling: Mapping[str, float | int | str]) -> float:
    """Return the factor on scores of latent attention: 1 / sqrt(D), sharpened under YaRN."""
    growth = 1.0
    if scaling.get("rope_type", scaling.get("type")) == "yarn":
        growth = _yarn_growth(scaling, float(scaling.get("mscale_all_dim", 0)))
    return growth**2 / math.sqrt(head_dim)


def _yarn_growth(scaling: Mapping[str, float | int | str], strength: float) -> float:
    factor = float(scaling["factor"])
    return 1.0 if factor <= 1 else 1 + 0.1 * strength * math.log(factor)


def tables(
    positions: Tensor, frequencies: Tensor, dtype: torch.dtype, magnitude: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [B, 1, S, D] of every position, computed in fp32."""
    angles = positions[:, None, :, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos(), angles.sin()
    if magnitude != 1.0:
        cos, sin = cos * magnitude, sin * magnitude
    return cos.to(dtype), sin.to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads turned by their positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rotate_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads turned by their positions, pair (2 i, 2 i + 1) by frequency i.

    The result lies in halves (all first coordinates, then all second ones): queries and keys alike,
    so that their products do not see it.
    """
    halves = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    return rotate(halves, cos, sin)
