"""Hugging Face Accelerate: a plan as the YAML of `accelerate launch`.

Three engines stand behind it, and the plan picks one: DDP (replicas, or a tensor axis alone), FSDP
version 2 (ZeRO-2 and 3, with tensor and context axes), DeepSpeed (ZeRO-1, states offloaded without
their parameters, Ulysses). `cp_size` is FSDP's, `sp_size` DeepSpeed's. FSDP fails on a mesh that
has no ranks to shard over (huggingface/accelerate#3798, #4180), whatever the stage is called.

The training script is yours; batch sizes go to it under the names of Hugging Face's
TrainingArguments.

Source: huggingface/accelerate `commands/config/config_args.py`, `parallelism_config.py` and
`utils/dataclasses.py` of 1.12 (2025).
"""

from pathlib import PurePosixPath

from costmodels.hardware import Cluster
from costmodels.job import Optimizer, Precision, Target, TrainingJob
from costmodels.layout import AXES, ContextParallelType, Layout, Offload, Recompute
from costmodels.model import ModelSpec
from planner.emit.emission import CannotExpress, Emission, EmittedFile, Variable
from planner.emit.launch import MASTER_PORT, Options, command_of, launch_files
from planner.emit.text import Value, Word, comment, yaml_text

CONFIG = "accelerate.yaml"
KEEPS_PARAMETERS = 2  # ZeRO-2: shards gathered in forward stay until backward
FULLY_SHARDED = 3
NODE_WORDS = '--machine_rank "$PET_NODE_RANK" --main_process_ip "$PET_MASTER_ADDR"'

# The module that FSDP wraps, by model_type (`_no_split_modules` of transformers 5.24).
LAYER_CLASSES = {
    "bloom": "BloomBlock",
    "deepseek_v2": "DeepseekV2DecoderLayer",
    "deepseek_v3": "DeepseekV3DecoderLayer",
    "falcon": "FalconDecoderLayer",
    "gemma": "GemmaDecoderLayer",
    "gemma2": "Gemma2DecoderLayer",
    "gpt2": "GPT2Block",
    "gpt_neox": "GPTNeoXLayer",
    "gpt_oss": "GptOssDecoderLayer",
    "llama": "LlamaDecoderLayer",
    "mistral": "MistralDecoderLayer",
    "mixtral": "MixtralDecoderLayer",
    "olmo": "OlmoDecoderLayer",
    "olmo2": "Olmo2DecoderLayer",
    "phi3": "Phi3DecoderLayer",
    "qwen2": "Qwen2DecoderLayer",
    "qwen2_moe": "Qwen2MoeDecoderLayer",
    "qwen3": "Qwen3DecoderLayer",
    "qwen3_moe": "Qwen3MoeDecoderLayer",
}

Section = dict[str, Value]


def emit_accelerate(
    model: ModelSpec, job: TrainingJob, cluster: Cluster, layout: Layout
) -> Emission:
    """Return the YAML and launcher for Accelerate.

    Raises:
        CannotExpress: None of its engines has an option for a part of the plan.

    """
    _refuse(job, layout)
    config: Section = {
        "compute_environment": "LOCAL_MACHINE",
        "num_machines": cluster.num_nodes,
        "num_processes": cluster.num_gpus,
        "mixed_precision": _precision(job),
        "main_training_function": "main",
        "main_process_port": MASTER_PORT,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
        **_engine(model, layout),
    }
    if job.precision is Precision.FP8:
        config["fp8_config"] = {"backend": "TE", "fp8_format": "HYBRID"}
    environment = (
        Variable(
            name="PYTORCH_CUDA_ALLOC_CONF",
            value="expandable_segments:True",
            reason="Less memory lost to fragmentation.",
        ),
    )
    program = ("accelerate", "launch", "--config_file", PurePosixPath(CONFIG))
    title = f"Accelerate: {model.name}"
    text = f"# {comment(title)}\n" + yaml_text(config)
    groups = (_script_options(job, layout),)
    launcher = launch_files(title, cluster, program, groups, environment, node_words=NODE_WORDS)
    return Emission(
        target=Target.ACCELERATE,
        files=(EmittedFile(path=CONFIG, text=text), *launcher),
        environment=environment,
        command=command_of(program, groups),
    )


def _cannot(what: str, remedy: str = "") -> CannotExpress:
    return CannotExpress(Target.ACCELERATE, what, remedy)


def _refuse(job: TrainingJob, layout: Layout) -> None:
    refused = (
        (layout.rank_order != AXES, f"the rank order {','.join(layout.rank_order)}", ""),
        (
            layout.recompute_layers not in (0, max(layout.layers_per_stage)),
            f"recomputing {layout.recompute_layers} layers",
            "use all or none",
        ),
        (job.lora_rank is not None, "adapters (--lora-rank); they belong to the script", ""),
        (job.chunked_loss, "a chunked loss; it belongs to the script", "use --loss full"),
        (job.grad_dtype == "bf16", "gradients reduced in bf16", "use --grad-dtype fp32"),
        (
            job.optimizer not in (Optimizer.ADAMW, Optimizer.SGD),
            f"the optimizer {job.optimizer.value}",
            "use --optimizer adamw",
        ),
    )
    for is_there, what, remedy in refused:
        if is_there:
            raise _cannot(what, remedy)


def _precision(job: TrainingJob) -> str:
    names = {
        Precision.BF16: "bf16",
        Precision.FP16: "fp16",
        Precision.FP32: "no",
        Precision.FP8: "fp8",
    }
    if job.precision not in names:
        raise _cannot(f"training in {job.precision.value}", "use --precision bf16 or fp8")
    return names[job.precision]


def _engine(model: ModelSpec, layout: Layout) -> Section:
    ulysses = layout.context_parallel > 1 and (
        layout.context_parallel_type is ContextParallelType.ULYSSES
    )
    states_alone = Offload.OPTIMIZER in layout.offload and Offload.PARAMETERS not in layout.offload
    if layout.zero_stage == 1 or ulysses or states_alone:
        return _deepspeed(layout)
    if _by_fsdp(layout):
        return _fsdp(model, layout)
    return _whole(layout)


def _by_fsdp(layout: Layout) -> bool:
    """Ranks share states, or there is one GPU, whose parameters FSDP may still offload."""
    shares = layout.zero_group * layout.context_parallel > 1 or layout.num_gpus == 1
    return layout.zero_stage >= KEEPS_PARAMETERS and shares


def _whole(layout: Layout) -> Section:
    """No two ranks share a state: replicas, or one model cut by the tensor axis."""
    if Offload.PARAMETERS in layout.offload:
        raise _cannot("offload of parameters that no ranks share", "use --zero-group above 1")
    if layout.tensor_parallel == 1:
        return {"distributed_type": "MULTI_GPU" if layout.data_parallel > 1 else "NO"}
    axes: Section = {
        "parallelism_config_dp_replicate_size": 1,
        "parallelism_config_dp_shard_size": 1,
        "parallelism_config_tp_size": layout.tensor_parallel,
        "parallelism_config_cp_size": 1,
    }
    return {"distributed_type": "MULTI_GPU", "parallelism_config": axes}


def _fsdp(model: ModelSpec, layout: Layout) -> Section:
    context = layout.context_parallel
    if layout.zero_group % context:
        what = f"a ZeRO group of {layout.zero_group} with context parallel {context}"
        raise _cannot(what, f"use a multiple of {context}")
    shards = layout.zero_group // context
    replicas = layout.data_parallel // shards
    if model.architecture not in LAYER_CLASSES:
        raise _cannot(f"the layers of {model.architecture} for FSDP to wrap")
    options: Section = {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": LAYER_CLASSES[model.architecture],
        "fsdp_reshard_after_forward": layout.zero_stage == FULLY_SHARDED,
        "fsdp_offload_params": Offload.PARAMETERS in layout.offload,
        "fsdp_activation_checkpointing": layout.recompute is Recompute.FULL,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True,
    }
    axes: Section = {
        "parallelism_config_dp_replicate_size": replicas,
        "parallelism_config_dp_shard_size": shards,
        "parallelism_config_tp_size": layout.tensor_parallel,
        "parallelism_config_cp_size": context,
    }
    if context > 1:
        is_ring = layout.context_parallel_type is ContextParallelType.RING
        axes["parallelism_config_cp_comm_strategy"] = "alltoall" if is_ring else "allgather"
    return {
        "distributed_type": "FSDP",
        "fsdp_config": options,
        "parallelism_config": axes,
    }


def _deepspeed(layout: Layout) -> Section:
    shards = layout.data_parallel * layout.context_parallel
    if layout.tensor_parallel > 1:
        raise _cannot("tensor parallelism with DeepSpeed's ZeRO", "use --zero 2 or 3, or --tp 1")
    if layout.zero_stage > 0 and layout.zero_group < shards:
        what = f"DeepSpeed's ZeRO in groups of {layout.zero_group} of {shards} ranks"
        raise _cannot(what, f"use --zero-group {shards}")
    options: Section = {
        "zero_stage": layout.zero_stage,
        "gradient_accumulation_steps": layout.num_micro_batches,
        "gradient_clipping": 1.0,
        "offload_optimizer_device": "cpu" if Offload.OPTIMIZER in layout.offload else "none",
        "offload_param_device": "cpu" if Offload.PARAMETERS in layout.offload else "none",
    }
    engine: Section = {"distributed_type": "DEEPSPEED", "deepspeed_config": options}
    if layout.context_parallel > 1:
        engine["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": 1,
            "parallelism_config_dp_shard_size": layout.data_parallel,
            "parallelism_config_sp_size": layout.context_parallel,
            "parallelism_config_sp_backend": "deepspeed",
        }
    return engine


def _script_options(job: TrainingJob, layout: Layout) -> Options:
    options: list[tuple[Word, ...]] = [
        ("train.py",),
        ("--per_device_train_batch_size", str(layout.micro_batch_size)),
        ("--gradient_accumulation_steps", str(layout.num_micro_batches)),
        ("--optim", "sgd" if job.optimizer is Optimizer.SGD else "adamw_torch_fused"),
    ]
    if layout.recompute is Recompute.FULL and not _by_fsdp(layout):  # FSDP's has its own option
        options.append(("--gradient_checkpointing", "true"))
    return Options(
        name="SCRIPT_ARGS",
        why="Your training script, and what it is told by the names of TrainingArguments; it cuts "
        f"sequences to {job.seq_len} tokens.",
        options=tuple(options),
    )
