"""Which rules layouts break: those of tables, and those of the split of layers over stages.

Tables hold no splits, so what a split must obey is judged per layout.

A build that trained 28 of 30 layers (NVIDIA/Megatron-LM#1304) is why the sum is a rule.
"""

from collections.abc import Sequence

from costmodels.hardware import Cluster
from costmodels.job import Target, TrainingJob
from costmodels.layout import Layout, Recompute
from costmodels.layout_table import table_of
from costmodels.model import ModelSpec
from planner.rules.rule import Case, Mask, Rule
from planner.rules.shapes import STAGES_HOLD_LAYERS

Inputs = tuple[ModelSpec, TrainingJob, Cluster]


def _not_in_tables(case: Case) -> Mask:
    """Tables do not hold splits: whoever makes a split judges it (`broken_rules`)."""
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
RECOMPUTE_LAYERS_FIT = _split_rule(
    "recompute_layers_fit",
    "--recompute-layers {recompute_layers} is for --recompute full (this is {recompute}) and at "
    "most the longest stage of {layers_per_stage}",
    ("layers_per_stage",),
    blames=("recompute_layers", "recompute"),
)


def broken_rules(
    rules: Sequence[Rule], inputs: Inputs, layouts: Sequence[Layout]
) -> list[tuple[Rule, ...]]:
    """Return for each layout the rules that it breaks, those of its split last.

    Args:
        rules: Of tables.
        inputs: Model, job and cluster.
        layouts: With every degree at least 1.

    """
    if not layouts:
        return []
    model, job, cluster = inputs
    rows = Case(model=model, job=job, cluster=cluster, table=table_of(list(layouts)))
    obeyed = [rule.holds(rows) for rule in rules]
    found = []
    for row, layout in enumerate(layouts):
        of_table = (rule for rule, holds in zip(rules, obeyed, strict=True) if not holds[row])
        broken = (*of_table, *_broken_by_split(model, layout))
        if _ends_stand_alone(job.target, layout):
            asks_for_layers = (STAGES_HOLD_LAYERS, STAGES_HAVE_LAYERS)
            broken = tuple(rule for rule in broken if rule not in asks_for_layers)
        found.append(broken)
    return found


def _broken_by_split(model: ModelSpec, layout: Layout) -> tuple[Rule, ...]:
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


def _ends_stand_alone(target: Target, layout: Layout) -> bool:
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


def _recompute_fits(layout: Layout) -> bool:
    if layout.recompute_layers == 0:
        return True
    longest = max(layout.layers_per_stage, default=0)
    return layout.recompute is Recompute.FULL and 0 < layout.recompute_layers <= longest
