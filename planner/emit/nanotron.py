"""nanotron: a plan as its YAML, for the Llama and Qwen2 classes.

nanotron divides the layers over stages itself, by cost with the head weighed in; a plan with
another split is refused with the split that nanotron would make.

Source: huggingface/nanotron `src/nanotron/config/*.py`, `models/base.py` (build_model) and
`examples/config_qwen.yaml` (main, 2025).
"""

from pathlib import PurePosixPath

from costmodels.hardware import Cluster
from costmodels.job import Optimizer, Precision, Target, TrainingJob
from costmodels.layout import AXES, Layout, Recompute, Schedule
from costmodels.model import ModelSpec
from planner.emit.emission import CannotExpress, Emission, EmittedFile, Variable
from planner.emit.launch import Options, command_of, launch_files, torchrun
from planner.emit.text import Value, comment, identifier, yaml_text
from planner.rules.own_splits import nanotron_split

CONFIG = "nanotron.yaml"
CLASSES = {"llama": "is_llama_config", "mistral": "is_llama_config", "qwen2": "is_qwen2_config"}
ENGINES = {Schedule.GPIPE: "afab", Schedule.ONE_F_ONE_B: "1f1b"}

Section = dict[str, Value]


def emit_nanotron(model: ModelSpec, job: TrainingJob, cluster: Cluster, layout: Layout) -> Emission:
    """Return the YAML and launcher for nanotron.

    Raises:
        CannotExpress: nanotron has no such model, or no option for a part of the plan.

    """
    _refuse(job, layout)
    _check_split(model, layout)
    environment = (
        Variable(
            name="CUDA_DEVICE_MAX_CONNECTIONS",
            value="1",
            reason="Kernels start in the order of their launch; nanotron asserts it for tensor "
            "parallelism that overlaps.",
        ),
    )
    program = (*torchrun(cluster), "run_train.py")
    groups = (
        Options(
            name="CONFIG_ARGS",
            why="Everything is in the YAML; without a dataset, nanotron makes up tokens.",
            options=(("--config-file", PurePosixPath(CONFIG)),),
        ),
    )
    title = f"nanotron: {model.name}"
    head = f"# {comment(title)}\n# Rates, steps and data are placeholders.\n"
    text = head + yaml_text(_config(model, job, layout))
    return Emission(
        target=Target.NANOTRON,
        files=(
            EmittedFile(path=CONFIG, text=text),
            *launch_files(title, cluster, program, groups, environment),
        ),
        environment=environment,
        command=command_of(program, groups),
    )


def _config(model: ModelSpec, job: TrainingJob, layout: Layout) -> Section:
    return {
        "general": {"project": "planned", "run": identifier(model.name), "seed": 42},
        "model": {
            "ddp_bucket_cap_mb": 25,
            "dtype": _dtype(job),
            "init_method": {"std": 0.02},
            "make_vocab_size_divisible_by": 1,
            "model_config": _model(model),
        },
        "parallelism": _parallelism(job, layout),
        "tokens": {
            "sequence_length": job.seq_len,
            "train_steps": 100,
            "micro_batch_size": layout.micro_batch_size,
            "batch_accumulation_per_replica": layout.num_micro_batches,
            "val_check_interval": -1,
        },
        "optimizer": _optimizer(job, layout),
        "tokenizer": {"tokenizer_name_or_path": None},
        "checkpoints": {"checkpoints_path": "checkpoints", "checkpoint_interval": 1000},
        "logging": {"log_level": "info", "iteration_step_info_interval": 1},
        "data_stages": [
            {
                "name": "Training",
                "start_training_step": 1,
                "data": {"dataset": None, "num_loading_workers": 1, "seed": 42},
            }
        ],
    }


def _cannot(what: str, remedy: str = "") -> CannotExpress:
    return CannotExpress(Target.NANOTRON, what, remedy)


def _refuse(job: TrainingJob, layout: Layout) -> None:
    shards = layout.data_parallel * layout.context_parallel
    order = ",".join(layout.rank_order)
    refused = (
        (layout.expert_parallel > 1, "expert parallelism of these models", "use --ep 1"),
        (layout.rank_order != AXES, f"the rank order {order}", "use tp,cp,dp,pp"),
        (
            layout.zero_stage > 0 and layout.zero_group < shards,
            f"ZeRO in groups of {layout.zero_group} of {shards} ranks",
            f"use --zero-group {shards}",
        ),
        (
            layout.recompute_layers not in (0, max(layout.layers_per_stage)),
            f"recomputing {layout.recompute_layers} layers per stage",
            "use all or none",
        ),
        (bool(layout.offload), "offload", "use --offload none"),
        (job.lora_rank is not None, "adapters (--lora-rank)", "leave --lora-rank out"),
        (job.chunked_loss, "a chunked loss", "use --loss full"),
    )
    for is_there, what, remedy in refused:
        if is_there:
            raise _cannot(what, remedy)


def _check_split(model: ModelSpec, layout: Layout) -> None:
    own = nanotron_split(model, layout.num_stages)
    if layout.pipeline_parallel > 1 and layout.layers_per_stage != own:
        planned = ",".join(map(str, layout.layers_per_stage))
        theirs = ",".join(map(str, own))
        what = f"the split {planned}; it divides the layers itself, as {theirs}"
        raise _cannot(what, f"plan with --layers-per-stage {theirs}")


def _model(model: ModelSpec) -> Section:
    reasons = (
        (model.architecture not in CLASSES, f"{model.architecture} models (llama, qwen2)"),
        (model.moe is not None, "these experts"),
        (model.head_dim * model.num_attention_heads != model.hidden_size, "this width of heads"),
        (model.window is not None, "a sliding window"),
        (model.qkv_bias and model.architecture != "qwen2", "biases of a Llama"),
        (model.attention_output_bias or model.ffn_bias, "biases beside query, key and value"),
        (model.rope_theta is None or model.num_position_embeddings > 0, "other than RoPE"),
        (model.norm != "rmsnorm" or not model.gated_ffn, "other than RMSNorm and SwiGLU"),
    )
    for is_there, what in reasons:
        if is_there:
            raise _cannot(what)
    scaling: Section = {
        key: int(value) if key.endswith("_position_embeddings") else value
        for key, value in model.rope_scaling
    }
    return {
        CLASSES[model.architecture]: True,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_kv_heads,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.training_seq_len,
        "hidden_act": model.activation,
        "attention_bias": model.qkv_bias,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling or None,
        "rope_interleaved": False,
        "tie_word_embeddings": model.tied_embeddings,
    }


def _parallelism(job: TrainingJob, layout: Layout) -> Section:
    scatters = layout.tensor_parallel > 1 and layout.sequence_parallel
    return {
        "dp": layout.data_parallel,
        "tp": layout.tensor_parallel,
        "pp": layout.pipeline_parallel,
        "context_parallel_size": layout.context_parallel,
        "expert_parallel_size": 1,
        "pp_engine": ENGINES[layout.schedule],
        "tp_mode": "REDUCE_SCATTER" if scatters else "ALL_REDUCE",
        "tp_linear_async_communication": scatters and job.switches.overlap_tensor_parallel,
        "tp_recompute_allgather": True,
        "recompute_layer": layout.recompute is Recompute.FULL,
    }


def _dtype(job: TrainingJob) -> str:
    names = {Precision.BF16: "bfloat16", Precision.FP16: "float16", Precision.FP32: "float32"}
    if job.precision not in names:
        raise _cannot(f"training in {job.precision.value}", "use --precision bf16")
    return names[job.precision]


def _optimizer(job: TrainingJob, layout: Layout) -> Section:
    if job.optimizer is Optimizer.ADAMW:
        factory: Section = {
            "name": "adamW",
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "adam_eps": 1e-8,
            "torch_adam_is_fused": True,
        }
    elif job.optimizer is Optimizer.SGD:
        factory = {"name": "sgd"}
    else:
        raise _cannot(f"the optimizer {job.optimizer.value}", "use --optimizer adamw")
    return {
        "zero_stage": layout.zero_stage,
        "accumulate_grad_in_fp32": job.grad_dtype != "bf16",
        "clip_grad": 1.0,
        "weight_decay": 0.1,
        "learning_rate_scheduler": {
            "learning_rate": 3e-4,
            "lr_warmup_steps": 2,
            "lr_warmup_style": "linear",
            "lr_decay_style": "cosine",
            "min_decay_lr": 3e-5,
        },
        "optimizer_factory": factory,
    }
