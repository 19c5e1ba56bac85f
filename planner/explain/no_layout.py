"""Why no layout at all is legal: one layout that keeps to the constraints, and the rules it breaks.

What is fixed keeps its first value and what is free is left out (degree 1), so that the rules that
are broken are those of the job, the machine and the user's own words.
"""

from costmodels.hardware import Cluster
from costmodels.job import TrainingJob
from costmodels.layout import ContextParallelType, Layout, Recompute, Schedule, split_layers
from costmodels.model import ModelSpec
from costmodels.schedule import PipelineShape, shape_refusals
from planner.constraints import Constraints
from planner.rules import Violation, apply_violations, violations

_SMALL_SHAPES = ((1, 1), (2, 1), (2, 2))  # ranks, stages per rank: one of them suits any schedule
_FILLED = 4  # micro-batches that fill each of them


def plainest_and_its_violations(
    model: ModelSpec, job: TrainingJob, cluster: Cluster, constraints: Constraints
) -> tuple[Layout, tuple[Violation, ...]]:
    """Return the plainest layout within the constraints, and the rules that it breaks, if any.

    Args:
        model: The network.
        job: What is trained per step.
        cluster: The machine.
        constraints: What the user fixed; the first value of each list stands for all.

    """
    layout = _plain_layout(model, job, cluster, constraints)
    broken = violations(model, job, cluster, layout)
    if not broken and constraints.runnable:
        broken = apply_violations(model, job, cluster, layout)
    return layout, broken


def _plain_layout(
    model: ModelSpec, job: TrainingJob, cluster: Cluster, constraints: Constraints
) -> Layout:
    def first(values: tuple[int, ...] | None, otherwise: int = 1) -> int:
        return values[0] if values else otherwise

    schedule = constraints.schedule[0] if constraints.schedule else None
    fewest, fewest_per_rank = _smallest_shape(schedule or Schedule.ONE_F_ONE_B)
    stages = first(constraints.pipeline_parallel, fewest)
    per_rank = first(constraints.stages_per_rank, fewest_per_rank)
    tensor, context = first(constraints.tensor_parallel), first(constraints.context_parallel)
    data = first(constraints.data_parallel, max(1, cluster.num_gpus // (tensor * stages * context)))
    batch = first(constraints.micro_batch_size)
    split = constraints.layers_per_stage or split_layers(model.num_layers, stages * per_rank)
    recompute = constraints.recompute[0] if constraints.recompute else Recompute.NONE
    return Layout(
        data_parallel=data,
        tensor_parallel=tensor,
        pipeline_parallel=stages,
        context_parallel=context,
        expert_parallel=first(constraints.expert_parallel),
        expert_tensor_parallel=first(constraints.expert_tensor_parallel),
        zero_stage=first(constraints.zero_stage, 0),
        zero_group=first(constraints.zero_group, data * context),
        keep_gathered=bool(constraints.keep_gathered and constraints.keep_gathered[0]),
        micro_batch_size=batch,
        num_micro_batches=max(1, job.global_batch_size // (data * batch)),
        stages_per_rank=per_rank,
        schedule=schedule or (Schedule.ONE_F_ONE_B if per_rank == 1 else Schedule.INTERLEAVED),
        recompute=recompute,
        recompute_layers=(constraints.recompute_layers or 0) if recompute is Recompute.FULL else 0,
        sequence_parallel=(
            constraints.sequence_parallel[0] if constraints.sequence_parallel else tensor > 1
        ),
        context_parallel_type=(
            constraints.context_parallel_type[0]
            if constraints.context_parallel_type
            else ContextParallelType.RING
        ),
        offload=constraints.offload[0] if constraints.offload else (),
        layers_per_stage=split,
    )


def _smallest_shape(schedule: Schedule) -> tuple[int, int]:
    """Return the fewest ranks and stages per rank that a schedule runs on."""
    return next(
        (ranks, stages)
        for ranks, stages in _SMALL_SHAPES
        if not shape_refusals(
            PipelineShape(
                schedule=schedule,
                pipeline_parallel=ranks,
                stages_per_rank=stages,
                num_micro_batches=_FILLED,
            )
        )
    )
