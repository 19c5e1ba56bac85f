"""Layout: one way to spread a training step over GPUs; one point of the search space.

    data_parallel * tensor_parallel * pipeline_parallel * context_parallel = GPUs

Expert parallelism folds over data x context x tensor inside a stage (expert_parallel *
expert_tensor_parallel divides their product) and does not multiply into the GPUs. ZeRO shards
over data x context in groups of `zero_group` ranks, with copies across groups (HSDP).

Ranks are laid out with the tensor axis innermost: tensor, context, data, pipeline, unless
`rank_order` says otherwise.
"""

from dataclasses import dataclass
from enum import StrEnum


class Schedule(StrEnum):
    """Pipeline schedules, by the names of the command line."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved-1f1b"
    ZERO_BUBBLE = "zero-bubble"
    ZBV = "zbv"
    DUALPIPEV = "dualpipev"

    @property
    def is_v_shaped(self) -> bool:
        """Whether a rank holds stage r and stage 2 * pp - 1 - r, rather than every pp-th."""
        return self in (Schedule.ZBV, Schedule.DUALPIPEV)


class Recompute(StrEnum):
    """What the backward pass computes again instead of keeping."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class ContextParallelType(StrEnum):
    """How attention sees the whole of a split sequence."""

    RING = "ring"
    ULYSSES = "ulysses"
    ALL_GATHER = "all-gather"


class Offload(StrEnum):
    """What may live in host memory; parts combine, `parameters` implies `optimizer`."""

    OPTIMIZER = "optimizer"
    PARAMETERS = "parameters"
    ACTIVATIONS = "activations"


AXES = ("tp", "cp", "dp", "pp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees and choices of one layout.

    Attributes:
        zero_group: Ranks that a state is cut over; data_parallel * context_parallel cuts it once.
        keep_gathered: ZeRO-3 gathers a rank's weights once per step and keeps them whole until its
            last backward; otherwise for each forward and each backward of a micro-batch.
        micro_batch_size: Sequences per forward on one data-parallel rank.
        num_micro_batches: Forwards per optimizer step and pipeline (gradient accumulation).
        stages_per_rank: Virtual pipeline stages on each rank.
        recompute_layers: Layers per stage under full recomputation; 0 means every layer.
        layers_per_stage: Layers of each global stage, in model order;
            pipeline_parallel * stages_per_rank entries that sum to the model's layers.
        rank_order: Axes from the fastest-varying to the slowest.

    """

    data_parallel: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    expert_tensor_parallel: int = 1
    zero_stage: int = 0
    zero_group: int = 1
    keep_gathered: bool = False
    micro_batch_size: int = 1
    num_micro_batches: int = 1
    stages_per_rank: int = 1
    schedule: Schedule = Schedule.ONE_F_ONE_B
    recompute: Recompute = Recompute.NONE
    recompute_layers: int = 0
    recompute_modules: tuple[str, ...] = ()
    sequence_parallel: bool = False
    context_parallel_type: ContextParallelType = ContextParallelType.RING
    offload: tuple[Offload, ...] = ()
    layers_per_stage: tuple[int, ...]
    rank_order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        """Refuse orders that leave an axis out or name another."""
        if self.rank_order != AXES and sorted(self.rank_order) != sorted(AXES):
            message = f"rank_order must hold each of {', '.join(AXES)} once, not {self.rank_order}"
            raise ValueError(message)

    @property
    def num_gpus(self) -> int:
        """GPUs that the layout fills."""
        return (
            self.data_parallel
            * self.tensor_parallel
            * self.pipeline_parallel
            * self.context_parallel
        )

    @property
    def num_stages(self) -> int:
        """Global pipeline stages, virtual ones counted."""
        return self.pipeline_parallel * self.stages_per_rank

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step."""
        return self.micro_batch_size * self.num_micro_batches * self.data_parallel

    @property
    def stages_are_v_shaped(self) -> bool:
        """See Schedule.is_v_shaped."""
        return self.schedule.is_v_shaped

    def rank_of_stage(self, stage: int) -> int:
        """Return the pipeline rank that holds a global stage."""
        return rank_of_stage(stage, self.pipeline_parallel, is_v_shaped=self.stages_are_v_shaped)

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the global stages that a pipeline rank holds, in model order."""
        if self.stages_are_v_shaped:
            both = (rank, 2 * self.pipeline_parallel - 1 - rank)
            return tuple(stage for stage in both if stage < self.num_stages)
        return tuple(range(rank, self.num_stages, self.pipeline_parallel))


def rank_of_stage(stage: int, pipeline_parallel: int, *, is_v_shaped: bool) -> int:
    """Return the pipeline rank that holds a global stage: every pp-th, or down a V and up again."""
    return (
        min(stage, 2 * pipeline_parallel - 1 - stage) if is_v_shaped else stage % pipeline_parallel
    )


def split_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Spread layers over stages as evenly as whole layers allow.

    Stages short of a layer stand at the two ends, last first, where the head and the embedding
    add their own work: 30 layers on 4 stages give (7, 8, 8, 7).
    """
    base, extra = divmod(num_layers, num_stages)
    short = num_stages - extra
    first = short // 2
    last = short - first
    return tuple(
        base if stage < first or stage >= num_stages - last else base + 1
        for stage in range(num_stages)
    )
