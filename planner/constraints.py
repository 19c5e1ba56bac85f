"""Constraints: what a user fixes of the layout; an axis that is None is free.

Values are what the command line's comma lists and ranges come to. They narrow the space; they
never make an illegal layout legal.
"""

from dataclasses import dataclass, replace
from typing import Any

from costmodels.job import Target
from costmodels.layout import ContextParallelType, Layout, Offload, Recompute, Schedule
from costmodels.model import ModelSpec
from planner.rules.expressible import ALL_OR_NONE
from planner.rules.own_splits import own_splits

Choices = tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Allowed values per axis.

    Attributes:
        offload: Each entry is one combination of parts, () for none.
        recompute_layers: Layers per stage under full recomputation, 0 for all; None leaves the
            choice open.
        layers_per_stage: A split that the user states.
        splits: The only splits that are possible, one per number of stages.
        max_memory_fraction: Share of the usable memory that reserved bytes may take; None is the
            border between fits and at_risk.
        allow_at_risk: Layouts above that border count as long as they are within the card.
        runnable: Only layouts that the native runtime executes today, or that the configuration
            of another target can say.
        min_tokens_per_expert: Tokens that an expert must see per micro-batch on average.

    """

    data_parallel: Choices = None
    tensor_parallel: Choices = None
    pipeline_parallel: Choices = None
    context_parallel: Choices = None
    expert_parallel: Choices = None
    expert_tensor_parallel: Choices = None
    zero_stage: Choices = None
    zero_group: Choices = None
    keep_gathered: tuple[bool, ...] | None = None
    micro_batch_size: Choices = None
    stages_per_rank: Choices = None
    schedule: tuple[Schedule, ...] | None = None
    recompute: tuple[Recompute, ...] | None = None
    sequence_parallel: tuple[bool, ...] | None = None
    context_parallel_type: tuple[ContextParallelType, ...] | None = None
    offload: tuple[tuple[Offload, ...], ...] | None = None
    rank_order: tuple[tuple[str, ...], ...] | None = None
    recompute_layers: int | None = None
    layers_per_stage: tuple[int, ...] | None = None
    splits: tuple[tuple[int, ...], ...] | None = None
    max_memory_fraction: float | None = None
    allow_at_risk: bool = False
    runnable: bool = False
    min_tokens_per_expert: int | None = None

    def __post_init__(self) -> None:
        """Refuse limits that no layout can meet."""
        share = self.max_memory_fraction
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"max_memory_fraction must lie in (0, 1], not {share}")


FREE = Constraints()
# Fields of a layout that are axes of the search by the same name.
_AXES = (
    "data_parallel",
    "tensor_parallel",
    "pipeline_parallel",
    "context_parallel",
    "expert_parallel",
    "expert_tensor_parallel",
    "zero_stage",
    "zero_group",
    "keep_gathered",
    "micro_batch_size",
    "stages_per_rank",
    "schedule",
    "recompute",
    "sequence_parallel",
    "context_parallel_type",
    "offload",
    "rank_order",
)


def only(layout: Layout) -> Constraints:
    """Return constraints that leave a layout's split and recomputed layers open, nothing else."""
    axes: dict[str, Any] = {name: (getattr(layout, name),) for name in _AXES}
    return Constraints(**axes)


def applicable(constraints: Constraints, target: Target, model: ModelSpec) -> Constraints:
    """Return the constraints, narrowed to plans that can be written for a target.

    Args:
        constraints: What the user fixed; where that cannot be written nothing is legal.
        target: The framework.
        model: The network.

    """
    layers, splits = constraints.recompute_layers, None
    if target in ALL_OR_NONE and layers is None:
        layers = 0
    if constraints.layers_per_stage is None:
        splits = own_splits(target, model)
    return replace(constraints, runnable=True, recompute_layers=layers, splits=splits)
