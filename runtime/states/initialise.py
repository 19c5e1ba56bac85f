"""First values of parameters: the same for every layout, since they depend on seed and name alone.

    weights and embeddings      normal(0, 0.02)
    projections that end a      normal(0, 0.02 / sqrt(2 num_layers)), so that the residual stream
      residual branch             keeps its size
    norm weights                1
    biases                      0

Numbers are drawn in chunks of rows, each from a generator of its own, so that a rank makes its
piece of a parameter from the chunks that it touches and never holds the whole.

Source: GPT-2 (Radford et al., 2019, section 2.3), kept by Megatron-LM and nanoGPT.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Generator, Tensor

from runtime.communication.mesh import Mesh
from runtime.program import ParameterShard

STANDARD_DEVIATION = 0.02
BRANCH_ENDS = ("o_proj.weight", "down_proj.weight", "c_proj.weight", "experts.down_proj")
CHUNK = 2**20  # chosen: elements drawn at once, 4 MiB; another value gives other numbers

# Fills a fresh [rows, width] tensor in place.
Fill: TypeAlias = Callable[[Tensor, Generator], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormalValues:
    """The values above, whole or by the piece, in fp32 on a device."""

    seed: int
    num_layers: int
    device: torch.device

    def __call__(self, shard: ParameterShard) -> Tensor:
        """Return the whole parameter."""
        return self._make(shard, whole_places(shard))

    def piece(self, shard: ParameterShard, mesh: Mesh) -> Tensor:
        """Return a rank's piece: what `shard.of_rank` cuts from the whole."""
        return self._make(shard, shard.places(mesh))

    def _make(self, shard: ParameterShard, places: Sequence[Tensor]) -> Tensor:
        if len(shard.global_shape) == 1:
            is_norm = shard.name.endswith("weight")
            return (places[0] >= 0).to(self.device) * float(is_norm)
        deviation = STANDARD_DEVIATION
        if shard.name.endswith(BRANCH_ENDS):
            deviation /= math.sqrt(2 * self.num_layers)

        def fill(rows: Tensor, generator: Generator) -> None:
            rows.normal_(0.0, deviation, generator=generator)

        return drawn(shard, places, fill, seed=self.seed, device=self.device)


def normal_initialiser(seed: int, num_layers: int, device: torch.device) -> NormalValues:
    """Return what makes first values on a device, in fp32."""
    return NormalValues(seed=seed, num_layers=num_layers, device=device)


def whole_places(shard: ParameterShard) -> tuple[Tensor, ...]:
    """Return the places of a whole parameter: all of them."""
    return tuple(torch.arange(size) for size in shard.global_shape)


def drawn(
    shard: ParameterShard,
    places: Sequence[Tensor],
    fill: Fill,
    *,
    seed: int,
    device: torch.device,
) -> Tensor:
    """Return the elements of a parameter at some places, drawn chunk by chunk.

    Args:
        shard: Gives name and whole shape.
        places: For each dim, which entries of the whole; -1 stands for padding, which is 0.
        fill: Draws a chunk: rows over the last dim, the others flattened.
        seed: Of the run.
        device: Where numbers are drawn; CPUs and GPUs draw different ones.

    """
    *lead, columns = places or (torch.zeros(1, dtype=torch.long),)
    rows = _flat_rows(lead, shard.global_shape)
    width = shard.global_shape[-1] if shard.global_shape else 1
    num_rows = math.prod(shard.global_shape[:-1])
    per_chunk = max(1, CHUNK // width)
    result = torch.zeros((len(rows), len(columns)), device=device)
    kept = (columns >= 0).nonzero().flatten()
    takes_all = len(kept) == width and torch.equal(columns, torch.arange(width))
    chunk_of = torch.where(rows >= 0, rows // per_chunk, -1)
    for chunk in torch.unique(chunk_of).tolist():
        if chunk < 0:
            continue
        first = chunk * per_chunk
        values = torch.empty((min(per_chunk, num_rows - first), width), device=device)
        generator = Generator(device).manual_seed(_seed_of(seed, shard.name, chunk))
        fill(values, generator)
        here = (chunk_of == chunk).nonzero().flatten()
        values = values[(rows[here] - first).to(device)]
        if takes_all:
            result[here.to(device)] = values
        else:
            target = (here.unsqueeze(1).to(device), kept.to(device))
            result[target] = values[:, columns[kept].to(device)]
    return result.view([len(place) for place in places])


def _flat_rows(lead: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Return the rows that the leading dims name, -1 where any of them does not exist."""
    rows = torch.zeros(1, dtype=torch.long)
    for place, size in zip(lead, shape, strict=False):
        exists = (rows >= 0).unsqueeze(1) & (place >= 0)
        rows = torch.where(exists, rows.unsqueeze(1) * size + place, -1).flatten()
    return rows


def _seed_of(seed: int, name: str, chunk: int) -> int:
    digest = hashlib.sha256(f"{seed}/{name}/{chunk}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # generators take signed numbers
