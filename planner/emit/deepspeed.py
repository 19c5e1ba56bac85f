"""DeepSpeed: a plan as `ds_config.json` and the launcher of a training script.

A DeepSpeed config says batch, precision, ZeRO, offload, tensor (AutoTP) and sequence (Ulysses)
degrees. Pipelines and expert groups are made in the training program's code, not in the config, so
they are refused here.

The training script is yours: it calls `deepspeed.initialize` with the config and enables gradient
checkpointing where `--gradient_checkpointing` says so.

Source: deepspeedai/DeepSpeed `runtime/config.py`, `runtime/zero/config.py`,
`runtime/tensor_parallel/config.py` and `deepspeed/__init__.py` of 0.18 (2026); MiCS groups are
refused by that version's config.
"""

import json
from pathlib import PurePosixPath

from costmodels.hardware import Cluster
from costmodels.job import Optimizer, Precision, Target, TrainingJob
from costmodels.layout import AXES, Layout, Offload, Recompute
from costmodels.model import ModelSpec
from planner.emit.emission import CannotExpress, Emission, EmittedFile, Variable
from planner.emit.launch import Options, command_of, launch_files, torchrun
from planner.emit.text import Value, Word

CONFIG = "ds_config.json"
PARAMETERS_SHARDED = 3
BUCKET_VALUES = 500_000_000  # DeepSpeed's default

EXPERT_BLOCKS = {  # class names of transformers 5.24
    "mixtral": "MixtralSparseMoeBlock",
    "qwen2_moe": "Qwen2MoeSparseMoeBlock",
    "qwen3_moe": "Qwen3MoeSparseMoeBlock",
    "deepseek_v2": "DeepseekV2Moe",
    "deepseek_v3": "DeepseekV3MoE",
    "gpt_oss": "GptOssMLP",
}

Section = dict[str, Value]


def emit_deepspeed(
    model: ModelSpec, job: TrainingJob, cluster: Cluster, layout: Layout
) -> Emission:
    """Return the JSON and launcher for DeepSpeed.

    Raises:
        CannotExpress: A DeepSpeed config has no option for a part of the plan.

    """
    _refuse(job, layout)
    config = _batch(job, layout)
    config |= _precision(job)
    config |= _optimizer(job)
    config["zero_optimization"] = _zero(model, job, layout)
    config["gradient_clipping"] = 1.0
    if layout.tensor_parallel > 1:
        config["tensor_parallel"] = {"autotp_size": layout.tensor_parallel}
    if layout.context_parallel > 1:  # both sizes together make the mesh
        config["sequence_parallel_size"] = layout.context_parallel
        config["data_parallel_size"] = layout.data_parallel
    if Offload.ACTIVATIONS in layout.offload:
        config["activation_checkpointing"] = {"cpu_checkpointing": True}
    environment = (
        Variable(
            name="PYTORCH_CUDA_ALLOC_CONF",
            value="expandable_segments:True",
            reason="Less memory lost to fragmentation.",
        ),
    )
    program = (*torchrun(cluster), "train.py")
    groups = (_script_options(job, layout),)
    title = f"DeepSpeed: {model.name}"
    return Emission(
        target=Target.DEEPSPEED,
        files=(
            EmittedFile(path=CONFIG, text=json.dumps(config, indent=2) + "\n"),
            *launch_files(title, cluster, program, groups, environment),
        ),
        environment=environment,
        command=command_of(program, groups),
    )


def _cannot(what: str, remedy: str = "") -> CannotExpress:
    return CannotExpress(Target.DEEPSPEED, what, remedy)


def _refuse(job: TrainingJob, layout: Layout) -> None:
    """Name the first part of the plan that lives in code, not in a DeepSpeed config."""
    shards = layout.data_parallel * layout.context_parallel
    tensor = layout.tensor_parallel > 1
    refused = (
        (layout.pipeline_parallel > 1, "a pipeline; PipelineModule makes it in code", "use --pp 1"),
        (layout.expert_parallel > 1, "expert groups; its MoE layer makes them", "use --ep 1"),
        (layout.expert_tensor_parallel > 1, "expert tensor parallelism", "use --etp 1"),
        (tensor and layout.sequence_parallel, "AutoTP with sequence parallelism", "switch it off"),
        (tensor and layout.context_parallel > 1, "AutoTP with Ulysses", "use --tp 1 or --cp 1"),
        (
            tensor and layout.zero_stage == PARAMETERS_SHARDED,
            "AutoTP with ZeRO-3",
            "use --zero 0, 1 or 2",
        ),
        (
            layout.zero_stage > 0 and layout.zero_group < shards,
            f"ZeRO in groups of {layout.zero_group} of {shards} ranks",
            f"use --zero-group {shards}",
        ),
        (layout.rank_order != AXES, f"the rank order {','.join(layout.rank_order)}", "tp first"),
        (job.lora_rank is not None, "adapters (--lora-rank); they belong to the script", ""),
        (job.chunked_loss, "a chunked loss; it belongs to the script", "use --loss full"),
        (
            layout.recompute is Recompute.SELECTIVE,
            "selective recomputation; it belongs to the model",
            "use --recompute none or full",
        ),
        (
            layout.recompute_layers not in (0, max(layout.layers_per_stage)),
            f"recomputing {layout.recompute_layers} layers",
            "use all or none",
        ),
    )
    for is_there, what, remedy in refused:
        if is_there:
            raise _cannot(what, remedy)


def _batch(job: TrainingJob, layout: Layout) -> Section:
    """The three sizes have to agree: total = micro x accumulation x data-parallel ranks."""
    return {
        "train_batch_size": job.global_batch_size,
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.num_micro_batches,
    }


def _precision(job: TrainingJob) -> Section:
    if job.precision is Precision.BF16:
        section: Section = {"bf16": {"enabled": True}}
    elif job.precision is Precision.FP16:
        section = {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}}
    elif job.precision is Precision.FP32:
        section = {}
    else:
        raise _cannot(f"training in {job.precision.value}", "use --precision bf16")
    if job.grad_dtype is not None:
        section["data_types"] = {"grad_accum_dtype": job.grad_dtype}
    return section


def _optimizer(job: TrainingJob) -> Section:
    if job.optimizer is Optimizer.ADAMW:
        rates: Section = {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
        return {"optimizer": {"type": "AdamW", "params": rates}}
    if job.optimizer is Optimizer.SGD:
        return {
            "optimizer": {"type": "SGD", "params": {"lr": 3e-4}},
            "zero_allow_untested_optimizer": True,
        }
    raise _cannot(f"the optimizer {job.optimizer.value}", "use --optimizer adamw")


def _zero(model: ModelSpec, job: TrainingJob, layout: Layout) -> Section:
    section: Section = {"stage": layout.zero_stage}
    if layout.zero_stage == 0:
        return section
    section |= {
        "overlap_comm": job.switches.overlap_grad_reduce,
        "contiguous_gradients": True,
        "reduce_bucket_size": BUCKET_VALUES,
    }
    cpu: Section = {"device": "cpu", "pin_memory": True}
    if Offload.OPTIMIZER in layout.offload or Offload.PARAMETERS in layout.offload:
        section["offload_optimizer"] = cpu
    if Offload.PARAMETERS in layout.offload:
        section["offload_param"] = cpu
    if layout.zero_stage == PARAMETERS_SHARDED:
        section["stage3_gather_16bit_weights_on_model_save"] = True
        if model.moe is not None:
            section["leaf_module"] = {"classes": [_expert_block(model)]}
    else:
        section["allgather_bucket_size"] = BUCKET_VALUES
    return section


def _expert_block(model: ModelSpec) -> str:
    """Return the class that ZeRO-3 gathers as one: ranks that visit other experts would hang."""
    if model.architecture not in EXPERT_BLOCKS:
        raise _cannot(f"ZeRO-3 of the experts of {model.architecture}", "use --zero 2")
    module, name = model.architecture, EXPERT_BLOCKS[model.architecture]
    return f"transformers.models.{module}.modeling_{module}.{name}"


def _script_options(job: TrainingJob, layout: Layout) -> Options:
    options: list[tuple[Word, ...]] = [
        ("--deepspeed", PurePosixPath(CONFIG)),
        ("--max_seq_length", str(job.seq_len)),
    ]
    if layout.recompute is Recompute.FULL:
        options.append(("--gradient_checkpointing",))
    return Options(
        name="SCRIPT_ARGS",
        why="What the training script, which is yours, has to be told.",
        options=tuple(options),
    )
