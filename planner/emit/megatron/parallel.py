"""How a step is spread over GPUs, as Megatron-LM arguments.

Layers per stage are stated only where there is a pipeline and the split is uneven: with one stage,
a leftover count makes Megatron train that many layers (NVIDIA/Megatron-LM#1778), and without one
it once dropped the remainder (#1304).

Source: NVIDIA/Megatron-LM `megatron/training/arguments.py`, Megatron-Core 0.15 (October 2025):
groups "distributed" and "moe"; `pipeline_parallel_layer_layout.py`.
"""

from costmodels.job import Precision, Target, TrainingJob
from costmodels.layout import AXES, ContextParallelType, Layout
from costmodels.model import ModelSpec
from planner.emit.emission import CannotExpress
from planner.emit.megatron.model import Option

FSDP_STAGE = 2  # gradients (2) and parameters (3) are sharded by Megatron-FSDP only
CONTEXT_TYPES = {
    ContextParallelType.RING: "p2p",
    ContextParallelType.ULYSSES: "a2a",
    ContextParallelType.ALL_GATHER: "allgather",
}


def parallel_options(model: ModelSpec, job: TrainingJob, layout: Layout) -> tuple[Option, ...]:
    """Return the options of axes, stages and sharding.

    Raises:
        CannotExpress: Megatron-LM has no such order of ranks or expert dispatch.

    """
    experts = _experts(job, layout) if model.moe is not None else []
    return (*_axes(job, layout), *experts, *_stages(layout), *_sharding(job, layout))


def _axes(job: TrainingJob, layout: Layout) -> list[Option]:
    options: list[Option] = [
        ("--tensor-model-parallel-size", str(layout.tensor_parallel)),
        ("--pipeline-model-parallel-size", str(layout.pipeline_parallel)),
    ]
    if layout.tensor_parallel > 1 and layout.sequence_parallel:
        options.append(("--sequence-parallel",))
        if job.switches.overlap_tensor_parallel:
            options.append(("--tp-comm-overlap",))
    if layout.context_parallel > 1:
        options += [
            ("--context-parallel-size", str(layout.context_parallel)),
            ("--cp-comm-type", CONTEXT_TYPES[layout.context_parallel_type]),
        ]
    if layout.rank_order == ("tp", "cp", "pp", "dp"):
        options.append(("--use-tp-pp-dp-mapping",))
    elif layout.rank_order != AXES:
        raise CannotExpress(
            Target.MEGATRON, f"the rank order {','.join(layout.rank_order)}", "use tp,cp,dp,pp"
        )
    return options


def _experts(job: TrainingJob, layout: Layout) -> list[Option]:
    dispatch: dict[str, list[Option]] = {
        "alltoall": [("--moe-token-dispatcher-type", "alltoall")],
        "deepep": [("--moe-token-dispatcher-type", "flex"), ("--moe-enable-deepep",)],
    }
    if job.switches.expert_dispatch not in dispatch:
        raise CannotExpress(
            Target.MEGATRON,
            f"expert dispatch {job.switches.expert_dispatch!r}",
            f"known: {', '.join(dispatch)}",
        )
    options: list[Option] = [
        ("--expert-model-parallel-size", str(layout.expert_parallel)),
        # Left out, it would be the tensor axis.
        ("--expert-tensor-parallel-size", str(layout.expert_tensor_parallel)),
        *dispatch[job.switches.expert_dispatch],
        ("--moe-permute-fusion",),
    ]
    if job.precision not in (Precision.FP16, Precision.FP32):  # its kernels are bf16's
        options.append(("--moe-grouped-gemm",))
    if job.switches.overlap_expert_parallel and layout.expert_parallel > 1:
        options.append(("--overlap-moe-expert-parallel-comm",))
    return options


def _stages(layout: Layout) -> list[Option]:
    """Return the split of layers over stages; nothing without a pipeline."""
    split = layout.layers_per_stage
    if layout.pipeline_parallel == 1:
        return []
    if len(set(split)) == 1:
        per_chunk = ("--num-layers-per-virtual-pipeline-stage", str(split[0]))
        return [per_chunk] if layout.stages_per_rank > 1 else []
    if layout.stages_per_rank == 1:
        if len(set(split[:-1])) == 1:
            return [("--decoder-last-pipeline-num-layers", str(split[-1]))]
        if len(set(split[1:])) == 1:
            return [("--decoder-first-pipeline-num-layers", str(split[0]))]
        if len(set(split[1:-1])) == 1:
            return [
                ("--decoder-first-pipeline-num-layers", str(split[0])),
                ("--decoder-last-pipeline-num-layers", str(split[-1])),
            ]
    return [("--pipeline-model-parallel-layout", pipeline_layout(split))]


def pipeline_layout(split: tuple[int, ...]) -> str:
    """Return Megatron's layout string: E embedding, t layer, L loss, | between stages."""
    return "E" + "|".join(f"t*{layers}" for layers in split) + "L"


def _sharding(job: TrainingJob, layout: Layout) -> list[Option]:
    shards = layout.data_parallel * layout.context_parallel
    overlaps = job.switches.overlap_grad_reduce and shards > 1
    if layout.zero_stage == 0:
        return [("--overlap-grad-reduce",)] if overlaps else []
    options: list[Option] = [("--use-distributed-optimizer",)]
    if layout.zero_stage >= FSDP_STAGE:
        strategy = "optim_grads" if layout.zero_stage == FSDP_STAGE else "optim_grads_params"
        options += [
            ("--use-megatron-fsdp",),
            ("--data-parallel-sharding-strategy", strategy),
            ("--ckpt-format", "fsdp_dtensor"),  # the only one that Megatron-FSDP writes
        ]
    if layout.zero_group < shards:
        copies = shards // layout.zero_group
        options.append(("--num-distributed-optimizer-instances", str(copies)))
    if overlaps:
        options += [("--overlap-grad-reduce",), ("--overlap-param-gather",)]
    return options
