"""Which tensors of Hugging Face's files make up a parameter of ours.

Our modules carry the files' names, with one exception: all experts of a layer are two tensors
here, one tensor per expert and matrix there.

    mlp.experts.gate_up_proj [E, 2 F, H]   experts.0.gate_proj.weight [F, H], experts.0.up_proj ...
    mlp.experts.down_proj    [E, H, F]     experts.0.down_proj.weight [H, F], ...
    mlp.gate.*                             the same, but for Mixtral's own words

Files that were saved without the head lack the first part of the name ("transformer.", "model.").

Source: the files of Hugging Face transformers 5.24, as `save_pretrained` writes them; the tests
compare.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

# What our files call the block of experts and its three matrices, and Mixtral's words for them.
_EXPERT_WORDS = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2")}
_COMMON_WORDS = ("mlp", "gate_proj", "up_proj", "down_proj")

# In published files, and no weights of the model: tables and masks of old versions.
_NO_WEIGHTS = re.compile(r"\.rotary_emb\.inv_freq$|(^|\.)h\.\d+\.attn\.(masked_)?bias$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A tensor of a file as a block of a parameter.

    Attributes:
        name: In the file.
        offsets: Where the block begins in the parameter, per dim.
        sizes: How far it reaches.
        is_whole: It is the parameter; otherwise it lacks the parameter's first dim (of experts).

    """

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    is_whole: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the file."""
        return self.sizes if self.is_whole else self.sizes[1:]


def tiles(architecture: str, name: str, shape: tuple[int, ...]) -> tuple[Tile, ...]:
    """Return the tensors of the files that make up a parameter; together they cover it.

    Args:
        architecture: Hugging Face's `model_type`.
        name: The parameter's in our modules.
        shape: The whole parameter's.

    """
    block, *words = _EXPERT_WORDS.get(architecture, _COMMON_WORDS)
    before, found, after = name.partition(".mlp.experts.")
    if not found:
        if ".mlp.gate." in name:
            name = name.replace(".mlp.gate.", f".{block}.gate.")
        return (Tile(name=name, offsets=(0,) * len(shape), sizes=shape, is_whole=True),)
    matrices = words[:2] if after == "gate_up_proj" else words[2:]
    return tuple(_of_experts(f"{before}.{block}.experts", matrices, shape))


def _of_experts(prefix: str, matrices: list[str], shape: tuple[int, ...]) -> Iterator[Tile]:
    rows = shape[1] // len(matrices)
    for expert in range(shape[0]):
        for place, matrix in enumerate(matrices):
            yield Tile(
                name=f"{prefix}.{expert}.{matrix}.weight",
                offsets=(expert, place * rows, 0),
                sizes=(1, rows, shape[2]),
                is_whole=False,
            )


def may_be_left(name: str, *, num_layers: int, is_tied: bool) -> bool:
    """Whether a tensor of a file belongs to no parameter and may stay there.

    Args:
        name: In the file.
        num_layers: Of the model: blocks behind them predict further tokens (DeepSeek-V3).
        is_tied: The head is the embedding, whatever the file has for it.

    """
    layer = _LAYER.search(name)
    is_beyond = layer is not None and int(layer.group(1)) >= num_layers
    return bool(_NO_WEIGHTS.search(name)) or is_beyond or (is_tied and name == "lm_head.weight")
