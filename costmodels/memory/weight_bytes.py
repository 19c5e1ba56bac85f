"""Bytes that one weight takes: in products, kept, as a gradient, in the optimizer and at its step.

They follow from precision, optimizer and the target runtime's habits.
"""

from dataclasses import dataclass

from costmodels.job import Optimizer, Precision, Target, TrainingJob
from costmodels.model import ModelSpec
from costmodels.parameters import num_parameters
from costmodels.targets import BEHAVIOURS, FrameworkBehaviour

LOW_PRECISIONS = (Precision.FP8, Precision.MXFP8, Precision.NVFP4)

FP32_BYTES = 4
# Bytes per weight of optimizer states, beside a 16-bit weight and beside an fp32 one (which is
# its own master). Contract: fp32 master weights and two fp32 moments; no master and two bf16
# moments; fp32 master and two 8-bit moments; nothing.
OPTIMIZER_BYTES = {
    Optimizer.ADAMW: (12, 8),
    Optimizer.ADAMW_BF16: (4, 4),
    Optimizer.ADAMW_8BIT: (6, 2),
    Optimizer.SGD: (0, 0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesPerWeight:
    """Bytes that one trained weight takes.

    Attributes:
        working: In matrix products.
        resident: In a ZeRO-3 shard, master weights apart.
        gradient: While gradients accumulate.
        optimizer: Master weight and moments.

    """

    working: int
    resident: int
    gradient: int
    optimizer: int


def bytes_per_weight(job: TrainingJob) -> BytesPerWeight:
    """Return what one trained weight takes under a job's precision, optimizer and target."""
    behaviour = BEHAVIOURS[job.target]
    is_fp32 = job.precision is Precision.FP32
    working = 4 if is_fp32 else 2
    optimizer = OPTIMIZER_BYTES[job.optimizer][is_fp32]
    has_master = not is_fp32 and job.optimizer in (Optimizer.ADAMW, Optimizer.ADAMW_8BIT)
    return BytesPerWeight(
        working=working,
        resident=0 if behaviour.master_is_parameter and has_master else working,
        gradient=4 if is_fp32 else _gradient_bytes(job, behaviour),
        optimizer=optimizer,
    )


def copies_at_step(job: TrainingJob) -> float:
    """Return bytes that an optimizer step copies per byte of optimizer states, buckets apart.

    Of 16-bit gradients optimizers make copies of their shard, or cast it to the master's format.
    """
    per_weight, behaviour = bytes_per_weight(job), BEHAVIOURS[job.target]
    copies = behaviour.step_bytes if per_weight.gradient < FP32_BYTES else 0
    master = per_weight.working if job.optimizer is Optimizer.ADAMW_BF16 else FP32_BYTES
    if behaviour.casts_to_master and master != per_weight.gradient:
        copies = master
    return copies / per_weight.optimizer if per_weight.optimizer else 0.0


def least_state_bytes(model: ModelSpec, job: TrainingJob) -> float:
    """Return bytes that every layout holds, over all GPUs and hosts: each weight's states once."""
    per_weight = bytes_per_weight(job)
    if job.lora_rank is not None:
        return float(num_parameters(model) * per_weight.working)
    return float(num_parameters(model) * (per_weight.resident + per_weight.optimizer))


def reduced_bytes(job: TrainingJob) -> int:
    """Return the bytes of a gradient on the wire, which is what runtimes reduce in, not keep."""
    if job.grad_dtype is None and BEHAVIOURS[job.target].reduces_in_16_bits:
        return 4 if job.precision is Precision.FP32 else 2
    return min(4, bytes_per_weight(job).gradient)


def _gradient_bytes(job: TrainingJob, behaviour: FrameworkBehaviour) -> int:
    if job.grad_dtype is not None:
        fp32 = 6 if behaviour.fp32_gradients_beside else 4
        return fp32 if job.grad_dtype == "fp32" else 2
    pure_16_bit = job.optimizer is Optimizer.ADAMW_BF16 and behaviour.master_is_parameter
    if pure_16_bit and job.target is not Target.NATIVE:
        return 2
    if job.precision is Precision.FP16:
        return behaviour.fp16_gradient_bytes
    return behaviour.bf16_gradient_bytes
