"""What the split of layers over stages must obey; judged per layout, never in a table.

A build that trained 28 of 30 layers (NVIDIA/Megatron-LM#1304) is why the sum is a rule.
"""

from costmodels.layout import Layout, Recompute
from costmodels.model import ModelSpec

LENGTH = "layers_per_stage_has_every_stage"
LENGTH_SAYS = (
    "--layers-per-stage {layers_per_stage} names {partition_stages} stages, but --pp "
    "{pipeline_parallel} x --stages-per-rank {stages_per_rank} makes {num_stages}"
)
SUM = "layers_per_stage_sums_to_layers"
SUM_SAYS = (
    "--layers-per-stage {layers_per_stage} sums to {partition_layers} layers, but {model} has "
    "{num_layers}; no layer is dropped silently"
)
EMPTY = "stages_have_layers"
EMPTY_SAYS = "--layers-per-stage {layers_per_stage} leaves a stage without layers"
RECOMPUTED = "recompute_layers_fit"
RECOMPUTED_SAYS = (
    "--recompute-layers {recompute_layers} is for --recompute full (this is {recompute}) and at "
    "most the longest stage of {layers_per_stage}"
)


def broken_partition_rules(model: ModelSpec, layout: Layout) -> tuple[tuple[str, str], ...]:
    """Return (rule, message template) of what the split breaks; templates as in `Rule.says`."""
    split = layout.layers_per_stage
    found: list[tuple[str, str]] = []
    if len(split) != layout.num_stages:
        found.append((LENGTH, LENGTH_SAYS))
    if sum(split) != model.num_layers:
        found.append((SUM, SUM_SAYS))
    elif min(split) < 1 and layout.num_stages <= model.num_layers:
        found.append((EMPTY, EMPTY_SAYS))
    if not _recompute_fits(layout):
        found.append((RECOMPUTED, RECOMPUTED_SAYS))
    return tuple(found)


def partition_holds(model: ModelSpec, layout: Layout) -> bool:
    """Whether every layer has a stage and every stage a layer."""
    return not broken_partition_rules(model, layout)


def _recompute_fits(layout: Layout) -> bool:
    if layout.recompute_layers == 0:
        return True
    longest = max(layout.layers_per_stage, default=0)
    return layout.recompute is Recompute.FULL and 0 < layout.recompute_layers <= longest
