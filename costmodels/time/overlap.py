"""Which communication each runtime hides behind which computation: named assumptions.

Hidden time is never a factor: `formulas.compute.overlap_exposed` gives what is left of it beside
the computation named here, and what the computation loses.

Sources: Megatron-LM, `LinearWithGradAccumulationAndAsyncCommunication` (tensor-parallel gradients
beside weight gradients) and `DistributedDataParallel(overlap_grad_reduce)`; PyTorch FSDP
(arXiv:2304.11277, sections 3.3 and 4.3: prefetch and reduce beside backward); nanotron
`tp_linear_async_communication`; DeepSpeed `overlap_comm`, and `TrainSchedule` of
its pipeline (ReduceGrads).
"""

from dataclasses import dataclass

import numpy as np

from costmodels.compiled.compute import Value
from costmodels.job import Target, TrainingJob
from costmodels.layout import Schedule
from costmodels.targets import BEHAVIOURS


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What hides.

    Attributes:
        tensor_backward: Communication of an input's gradient beside the product's weight gradient.
        tensor_pipelined: Gathers and scatters of sequence parallelism in pieces beside their own
            product (Megatron's --tp-comm-overlap, nanotron's asynchronous mode, torch's async TP).
        gathers_again: Under sequence parallelism backward gathers the input of a column-parallel
            product once more, beside its input gradient.
        grad_reduce: Gradients are reduced in buckets beside the last micro-batch's backward.
        reduces_after_pipeline: With pipeline stages, gradients are reduced after the last backward.
        param_gather: Gathering updated ZeRO-1/2 parameters beside the next step's first forward.
        prefetch: ZeRO-3 gathers the next layer beside the current one.
        accumulation: Weight gradients of micro-batches are summed inside the product that makes
            them, so that the sums pass through memory while it runs.
        experts: Expert all-to-all of one micro-batch beside another's computation.
        reduces_each_micro_batch: ZeRO-2 reduces gradients after each micro-batch, not once a step.
        gathers_each_tensor: ZeRO-3 moves every expert's matrices one by one, not a layer at once.

    """

    tensor_backward: bool
    tensor_pipelined: bool
    gathers_again: bool
    grad_reduce: bool
    reduces_after_pipeline: bool
    param_gather: bool
    prefetch: bool
    accumulation: bool
    experts: bool
    reduces_each_micro_batch: bool
    gathers_each_tensor: bool


def overlap_of(job: TrainingJob) -> Overlap:
    """Return what the job's runtime hides, its switches heeded."""
    target, switches = job.target, job.switches
    from_megatron = target in (Target.MEGATRON, Target.NANOTRON)
    return Overlap(
        tensor_backward=from_megatron,
        tensor_pipelined=switches.overlap_tensor_parallel,
        gathers_again=from_megatron,
        # nanotron adds micro-batches up in fp32 and reduces after the last one.
        grad_reduce=switches.overlap_grad_reduce and target is not Target.NANOTRON,
        # DeepSpeed's pipeline engine ends its schedule with an instruction of its own for it.
        reduces_after_pipeline=target is Target.DEEPSPEED,
        # Megatron-LM's --overlap-param-gather; our units wait for their own weights at first use.
        param_gather=switches.overlap_grad_reduce and target in (Target.MEGATRON, Target.NATIVE),
        prefetch=True,
        accumulation=BEHAVIOURS[target].fused_weight_gradient,
        experts=switches.overlap_expert_parallel,
        gathers_each_tensor=target is Target.DEEPSPEED,
        reduces_each_micro_batch=target in (Target.DEEPSPEED, Target.NATIVE),
    )


def passes_beside(
    stages_per_rank: Value, pipeline_parallel: Value, num_micro_batches: Value
) -> Value:
    """Return in how many passes of a rank's layers its states may be reduced or gathered.

    With one stage per rank that is the last (or first) micro-batch's. Interleaved stages are done
    one after another, each in turns of a micro-batch per rank: all but one of a rank's v stages
    have the turns of the stages that follow.

    Args:
        stages_per_rank: v; 1 where stages do not take turns.
        pipeline_parallel: Ranks of the pipeline.
        num_micro_batches: Micro-batches of a step; a turn has no more.

    """
    turn = np.minimum(pipeline_parallel, num_micro_batches)
    return (1 + (stages_per_rank - 1) * turn) / stages_per_rank


def sends_hold_rank(job: TrainingJob, schedule: Schedule) -> bool:
    """Return whether a rank waits while it hands a micro-batch on.

    Megatron-LM, DeepSpeed and nanotron exchange with their neighbours between two computations;
    Megatron-LM's interleaved schedule overlaps (`--overlap-p2p-communication`), as do torch's
    pipelining and our own runtime.
    """
    if job.target in (Target.NATIVE, Target.TORCHTITAN, Target.ACCELERATE):
        return False
    return not (
        job.target is Target.MEGATRON
        and schedule is Schedule.INTERLEAVED
        and job.switches.overlap_grad_reduce
    )


def scatters_hops(job: TrainingJob) -> bool:
    """Return whether tensor-parallel ranks share the work of handing activations on.

    Megatron-LM (scatter-gather), DeepSpeed (partitioned pipe) do so; our runtime and torch's
    pipelining send what each rank holds.
    """
    return job.target in (Target.MEGATRON, Target.DEEPSPEED)
