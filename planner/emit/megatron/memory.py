"""Number formats, recomputation, offload and optimizer, as Megatron-LM arguments.

Source: NVIDIA/Megatron-LM `megatron/training/arguments.py`, Megatron-Core 0.15 (October 2025):
groups "mixed precision", "training" and "Transformer-Engine".
"""

from costmodels.job import Optimizer, Precision, Target, TrainingJob
from costmodels.layout import Layout, Offload, Recompute
from costmodels.model import ModelSpec
from costmodels.targets import fuses_loss
from planner.emit.emission import CannotExpress
from planner.emit.megatron.model import Option

RECOMPUTE_MODULES = (
    "core_attn",
    "moe_act",
    "layernorm",
    "mla_up_proj",
    "mlp",
    "moe",
    "shared_experts",
)


def memory_options(model: ModelSpec, job: TrainingJob, layout: Layout) -> tuple[Option, ...]:
    """Return the options of number formats, kernels, recomputation and offload.

    Raises:
        CannotExpress: Megatron-LM has no such option, or excludes a combination.

    """
    return (
        *_precision(job),
        *_kernels(job, layout),
        *_recompute(layout),
        *_offload(model, layout),
    )


def _precision(job: TrainingJob) -> list[Option]:
    formats: dict[Precision, list[Option]] = {
        Precision.FP32: [],
        Precision.FP16: [("--fp16",)],
        Precision.BF16: [("--bf16",)],
        Precision.FP8: [("--bf16",), ("--fp8-format", "hybrid"), ("--fp8-recipe", "tensorwise")],
        Precision.MXFP8: [("--bf16",), ("--fp8-format", "e4m3"), ("--fp8-recipe", "mxfp8")],
        Precision.NVFP4: [("--bf16",), ("--fp4-format", "e2m1"), ("--fp4-recipe", "nvfp4")],
    }
    options = list(formats[job.precision])
    if job.switches.fp8_all_gather and job.precision in (Precision.FP8, Precision.MXFP8):
        options.append(("--fp8-param-gather",))
    if job.grad_dtype == "fp32":
        options.append(("--accumulate-allreduce-grads-in-fp32",))
    elif job.grad_dtype == "bf16":
        options.append(("--grad-reduce-in-bf16",))
    return options


def _kernels(job: TrainingJob, layout: Layout) -> list[Option]:
    options: list[Option] = [("--attention-backend", "auto" if job.flash_attention else "unfused")]
    if fuses_loss(job):
        options.append(("--cross-entropy-loss-fusion",))
    if job.switches.cuda_graphs:
        if layout.recompute is Recompute.FULL:
            raise CannotExpress(
                Target.MEGATRON, "CUDA graphs with full recomputation", "use --recompute selective"
            )
        options += [("--cuda-graph-impl", "transformer_engine"), ("--te-rng-tracker",)]
    return options


def _recompute(layout: Layout) -> list[Option]:
    if layout.recompute is Recompute.NONE:
        return []
    options: list[Option] = [("--recompute-granularity", layout.recompute.value)]
    if layout.recompute is Recompute.SELECTIVE:
        modules = layout.recompute_modules or ("core_attn",)
        for module in modules:
            if module not in RECOMPUTE_MODULES:
                known = ", ".join(RECOMPUTE_MODULES)
                raise CannotExpress(Target.MEGATRON, f"recomputing {module!r}", f"known: {known}")
        return [*options, ("--recompute-modules", *modules)]
    if layout.recompute_layers:  # so many of each stage; method and count belong together
        count = str(layout.recompute_layers)
        return [*options, ("--recompute-method", "block"), ("--recompute-num-layers", count)]
    return [*options, ("--recompute-method", "uniform"), ("--recompute-num-layers", "1")]


def _offload(model: ModelSpec, layout: Layout) -> list[Option]:
    options: list[Option] = []
    if Offload.OPTIMIZER in layout.offload:
        if layout.zero_stage == 0:
            raise CannotExpress(
                Target.MEGATRON, "offload of an optimizer that is not sharded", "use --zero 1"
            )
        options += [
            ("--optimizer-cpu-offload",),
            ("--use-precision-aware-optimizer",),
            ("--overlap-cpu-optimizer-d2h-h2d",),
        ]
    if Offload.ACTIVATIONS in layout.offload:  # the last layer's are needed again at once
        options.append(("--cpu-offloading-num-layers", str(model.num_layers - 1)))
    return options


def optimizer_options(job: TrainingJob, layout: Layout) -> tuple[Option, ...]:
    """Return the options of the optimizer; rates and decay are placeholders.

    Raises:
        CannotExpress: Megatron-LM keeps other states than the plan's optimizer.

    """
    rates: list[Option] = [("--lr", "3e-4"), ("--min-lr", "3e-5"), ("--clip-grad", "1.0")]
    regular: list[Option] = [("--attention-dropout", "0"), ("--hidden-dropout", "0")]
    if job.optimizer is Optimizer.SGD:
        return (("--optimizer", "sgd"), ("--sgd-momentum", "0"), *rates, *regular)
    options: list[Option] = [("--optimizer", "adam"), ("--weight-decay", "0.1"), *rates, *regular]
    if job.optimizer is Optimizer.ADAMW_8BIT:
        if layout.zero_stage == 0:
            raise CannotExpress(
                Target.MEGATRON, "8-bit moments that are not sharded", "use --zero 1"
            )
        if Offload.OPTIMIZER not in layout.offload:
            options.append(("--use-precision-aware-optimizer",))
        options += [("--exp-avg-dtype", "fp8"), ("--exp-avg-sq-dtype", "fp8")]
    elif job.optimizer is Optimizer.ADAMW_BF16:
        raise CannotExpress(
            Target.MEGATRON, "an optimizer without fp32 master weights (--optimizer adamw-bf16)"
        )
    return tuple(options)
