"""TrainingJob: what is trained per step, in which precision, under which runtime."""

from dataclasses import dataclass, field
from enum import StrEnum

from costmodels.config_keys import MAX_COUNT


class Precision(StrEnum):
    """Number formats of matrix products."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8 = "fp8"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"


class Target(StrEnum):
    """Runtimes whose rules and overheads the planner knows."""

    NATIVE = "native"
    MEGATRON = "megatron"
    TORCHTITAN = "torchtitan"
    DEEPSPEED = "deepspeed"
    NANOTRON = "nanotron"
    ACCELERATE = "accelerate"


class Optimizer(StrEnum):
    """Optimizers, by what they keep of each weight beside a 16-bit one.

    In bytes: `memory.weight_bytes.OPTIMIZER_BYTES`.

    `adamw` has an fp32 master weight and two fp32 moments, `adamw-bf16` two bf16 moments and no
    master, `adamw-8bit` an fp32 master and two 8-bit moments, `sgd` nothing.
    """

    ADAMW = "adamw"
    ADAMW_BF16 = "adamw-bf16"
    ADAMW_8BIT = "adamw-8bit"
    SGD = "sgd"


ATTENTION_KERNELS = ("flash-2", "flash-1", "fused-softmax", "torch-softmax")
EXPERT_DISPATCHERS = ("alltoall", "deepep", "hybridep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """Software facts that change speed or memory; defaults are what a current stack does.

    Attributes:
        attention_kernel: "flash-2", "flash-1", "fused-softmax" or "torch-softmax"; the last two
            write the scores to memory.
        fused_norm: Normalisation as one kernel; otherwise each step passes through memory and
            fp32 copies are kept.
        fused_cross_entropy: The loss as one kernel that reads the logits in their own format; None
            is the target's habit.
        overlap_grad_reduce: Data-parallel communication hides behind backward.
        overlap_tensor_parallel: Tensor-parallel collectives hide behind their GEMMs.
        overlap_expert_parallel: Expert all-to-all hides behind computation.
        expert_dispatch: "alltoall", "deepep" or "hybridep".
        cuda_graphs: Kernel launches are replayed; None is the target's habit.
        compile: Element-wise operations are fused by a compiler.
        balanced_routing: Experts receive equal shares of tokens.
        separate_gates: The gate of a feed-forward block is a layer of its own, which reduces its
            input's gradient over the tensor axis by itself where the sequence is not split.
        rowwise_fp8: 8-bit products have a scale per row of each operand, not one per tensor.
        expandable_segments: The allocator maps memory page by page, which leaves next to no holes.
        fp8_all_gather: ZeRO-3 gathers weights in 8 bits.
        power_limited: Boards run below their full power (`limited_power_share` of the profile).

    """

    attention_kernel: str = "flash-2"
    fused_norm: bool = True
    fused_cross_entropy: bool | None = None
    overlap_grad_reduce: bool = True
    overlap_tensor_parallel: bool = False
    overlap_expert_parallel: bool = False
    expert_dispatch: str = "alltoall"
    cuda_graphs: bool | None = None
    compile: bool | None = None
    balanced_routing: bool = False
    separate_gates: bool = False
    rowwise_fp8: bool = False
    expandable_segments: bool = False
    fp8_all_gather: bool = False
    power_limited: bool = False

    def __post_init__(self) -> None:
        """Refuse kernels and dispatchers that nothing is known of."""
        for name, known in (
            ("attention_kernel", ATTENTION_KERNELS),
            ("expert_dispatch", EXPERT_DISPATCHERS),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r:.60}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """One optimizer step of a training run.

    Attributes:
        seq_len: Tokens per sequence.
        global_batch_size: Sequences per optimizer step.
        flash_attention: Fused attention; False writes the scores to memory.
        grad_dtype: "fp32", "bf16", or None for what the target does.
        chunked_loss: The logits are never held whole.
        lora_rank: Rank of trained adapters over a frozen base; None trains everything.
        memory_taken: Bytes already taken on each GPU by something else.

    """

    seq_len: int
    global_batch_size: int
    precision: Precision = Precision.BF16
    flash_attention: bool = True
    optimizer: Optimizer = Optimizer.ADAMW
    grad_dtype: str | None = None
    chunked_loss: bool = False
    lora_rank: int | None = None
    memory_taken: int = 0
    target: Target = Target.NATIVE
    switches: Switches = field(default_factory=Switches)

    def __post_init__(self) -> None:
        """Refuse sizes that no step can have."""
        for name in ("seq_len", "global_batch_size", "lora_rank"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MAX_COUNT:
                message = f"{name} must lie between 1 and {MAX_COUNT}, not {value}"
                raise ValueError(message)
        if self.memory_taken < 0:
            message = f"memory_taken must be at least 0 bytes, not {self.memory_taken}"
            raise ValueError(message)
        if self.grad_dtype not in (None, "fp32", "bf16"):
            message = f"grad_dtype must be fp32 or bf16, not {self.grad_dtype!r}"
            raise ValueError(message)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.seq_len * self.global_batch_size
