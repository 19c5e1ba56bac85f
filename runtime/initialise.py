"""First values of parameters: the same for every layout, since they depend on seed and name alone.

    weights and embeddings      normal(0, 0.02)
    projections that end a      normal(0, 0.02 / sqrt(2 num_layers)), so that the residual stream
      residual branch             keeps its size
    norm weights                1
    biases                      0

Source: GPT-2 (Radford et al., 2019, section 2.3), kept by Megatron-LM and nanoGPT.
"""

import hashlib
import math

import torch
from torch import Tensor

from runtime.program import Initialiser, ParameterShard

STANDARD_DEVIATION = 0.02
BRANCH_ENDS = ("o_proj.weight", "down_proj.weight", "c_proj.weight", "experts.down_proj")


def normal_initialiser(seed: int, num_layers: int, device: torch.device) -> Initialiser:
    """Return a function that makes the whole of a parameter on a device, in fp32."""

    def initialise(shard: ParameterShard) -> Tensor:
        if len(shard.global_shape) == 1:
            is_norm = shard.name.endswith("weight")
            return torch.full(shard.global_shape, float(is_norm), device=device)
        deviation = STANDARD_DEVIATION
        if shard.name.endswith(BRANCH_ENDS):
            deviation /= math.sqrt(2 * num_layers)
        generator = torch.Generator(device).manual_seed(_seed_of(seed, shard.name))
        whole = torch.empty(shard.global_shape, device=device)
        return whole.normal_(0.0, deviation, generator=generator)

    return initialise


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # generators take signed numbers
