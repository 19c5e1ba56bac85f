"""Splits of layers over stages that a target makes by itself; a plan cannot ask for another.

Source: huggingface/nanotron `models/base.py` (build_model; main, 2025).
"""

from costmodels.job import Target
from costmodels.model import ModelSpec


def nanotron_split(model: ModelSpec, num_stages: int) -> tuple[int, ...]:
    """Return the layers of each stage as nanotron's `build_model` assigns them.

    Blocks go to a stage until their summed cost passes its share of the whole; a layer costs
    4 * A * D * H + 3 * F * H, the head V * H, the other blocks nothing.
    """
    hidden = model.hidden_size
    layer = hidden * (4 * model.num_attention_heads * model.head_dim + 3 * model.ffn_hidden_size)
    total = model.num_layers * layer + model.vocab_size * hidden
    split = [0] * num_stages
    stage = 0
    for placed in range(1, model.num_layers + 1):
        split[stage] += 1
        if placed * layer > total * ((stage + 1) / num_stages):
            stage += 1
    return tuple(split)


def own_splits(target: Target, model: ModelSpec) -> tuple[tuple[int, ...], ...] | None:
    """Return the splits that a target makes by itself, one per number of stages; None where any is.

    Splits with an empty stage are left out: nothing here runs one.
    """
    if target is not Target.NANOTRON:
        return None
    splits = (nanotron_split(model, stages) for stages in range(1, model.num_layers + 1))
    return tuple(split for split in splits if min(split) > 0)
