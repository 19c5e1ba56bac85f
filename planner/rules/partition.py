"""What the split of layers over stages must obey; judged per layout, never in a table.

A build that trained 28 of 30 layers (NVIDIA/Megatron-LM#1304) is why the sum is a rule.
"""

from costmodels.job import Target
from costmodels.layout import Layout, Recompute
from costmodels.model import ModelSpec
from planner.rules.rule import Case, Mask, Rule


def _not_in_tables(case: Case) -> Mask:
    """Tables do not hold splits: whoever makes a split judges it (`broken_partition_rules`)."""
    return case.always(holds=True)


def _split_rule(
    name: str, says: str, given: tuple[str, ...], blames: tuple[str, ...] = ("layers_per_stage",)
) -> Rule:
    return Rule(
        name=name,
        reads=(),
        holds=_not_in_tables,
        says=says,
        given=given,
        blames=blames,
    )


HAS_EVERY_STAGE = _split_rule(
    "layers_per_stage_has_every_stage",
    "--layers-per-stage {layers_per_stage} names {partition_stages} stages, but --pp "
    "{pipeline_parallel} x --stages-per-rank {stages_per_rank} makes {num_stages}",
    ("num_stages", "partition_stages"),
)
SUMS_TO_LAYERS = _split_rule(
    "layers_per_stage_sums_to_layers",
    "--layers-per-stage {layers_per_stage} sums to {partition_layers} layers, but {model} has "
    "{num_layers}; no layer is dropped silently",
    ("num_layers", "partition_layers"),
)
STAGES_HAVE_LAYERS = _split_rule(
    "stages_have_layers",
    "--layers-per-stage {layers_per_stage} leaves a stage without layers",
    ("num_layers", "num_stages"),
)
# What asks a layer of every stage; the first judges tables.
LAYERS_FOR_ALL_STAGES = ("stages_hold_layers", STAGES_HAVE_LAYERS.name)
RECOMPUTE_LAYERS_FIT = _split_rule(
    "recompute_layers_fit",
    "--recompute-layers {recompute_layers} is for --recompute full (this is {recompute}) and at "
    "most the longest stage of {layers_per_stage}",
    ("layers_per_stage",),
    blames=("recompute_layers", "recompute"),
)


def broken_partition_rules(model: ModelSpec, layout: Layout) -> tuple[Rule, ...]:
    """Return the rules that the split of one layout breaks."""
    split = layout.layers_per_stage
    found = []
    if len(split) != layout.num_stages:
        found.append(HAS_EVERY_STAGE)
    if sum(split) != model.num_layers:
        found.append(SUMS_TO_LAYERS)
    elif min(split) < 1 and layout.num_stages <= model.num_layers:
        found.append(STAGES_HAVE_LAYERS)
    if not _recompute_fits(layout):
        found.append(RECOMPUTE_LAYERS_FIT)
    return tuple(found)


def ends_stand_alone(target: Target, layout: Layout) -> bool:
    """Whether the only stages without layers are the ends, with the embedding or the head alone.

    Megatron counts those as layers where it is told to (`account_for_embedding_in_pipeline_split`,
    `account_for_loss_in_pipeline_split`): 126 layers then make 128 stages.
    """
    split = layout.layers_per_stage
    return (
        target is Target.MEGATRON
        and len(split) == layout.num_stages > 2  # noqa: PLR2004  (two ends and what lies between)
        and min(split) == 0
        and min(split[1:-1]) > 0
    )


def partition_holds(model: ModelSpec, layout: Layout) -> bool:
    """Whether every layer has a stage and every stage a layer."""
    return not broken_partition_rules(model, layout)


def _recompute_fits(layout: Layout) -> bool:
    if layout.recompute_layers == 0:
        return True
    longest = max(layout.layers_per_stage, default=0)
    return layout.recompute is Recompute.FULL and 0 < layout.recompute_layers <= longest
