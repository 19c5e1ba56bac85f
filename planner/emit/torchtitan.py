"""torchtitan: a plan as the TOML of a release of the 0.2 line.

torchtitan trains the models of its registry, by name and flavor, so the shape has to be one of
`FLAVORS`. Its tensor parallelism always splits the sequence, its data parallelism is DDP on one
axis or `fully_shard` over data x context, and every pipeline stage lists its modules here, since a
count per stage once dropped layers (pytorch/torchtitan#963).

Source: pytorch/torchtitan `config/job_config.py`, `models/*/__init__.py` and
`distributed/parallel_dims.py` of 0.2.1 (December 2025). Later releases read Python, not TOML.
"""

from collections.abc import Mapping
from pathlib import PurePosixPath

from costmodels.hardware import Cluster
from costmodels.job import Optimizer, Precision, Target, TrainingJob
from costmodels.layout import AXES, ContextParallelType, Layout, Offload, Recompute, Schedule
from costmodels.model import ModelSpec
from planner.emit.emission import CannotExpress, Emission, EmittedFile, Variable
from planner.emit.launch import Options, command_of, launch_files, torchrun
from planner.emit.text import Value, comment, toml_value

CONFIG = "torchtitan.toml"

# (hidden, layers, heads, key-value heads, feed-forward, vocabulary) -> name and flavor.
Shape = tuple[int, int, int, int, int, int]
FLAVORS: Mapping[Shape, tuple[str, str]] = {
    (4096, 32, 32, 8, 14336, 128256): ("llama3", "8B"),
    (8192, 80, 64, 8, 28672, 128256): ("llama3", "70B"),
    (16384, 126, 128, 8, 53248, 128256): ("llama3", "405B"),
    (1024, 28, 16, 8, 3072, 151936): ("qwen3", "0.6B"),
    (2048, 28, 16, 8, 6144, 151936): ("qwen3", "1.7B"),
    (2560, 36, 32, 8, 9728, 151936): ("qwen3", "4B"),
    (4096, 36, 32, 8, 12288, 151936): ("qwen3", "8B"),
    (5120, 40, 40, 8, 17408, 151936): ("qwen3", "14B"),
    (5120, 64, 64, 8, 25600, 151936): ("qwen3", "32B"),
    (2048, 48, 32, 4, 6144, 151936): ("qwen3", "30B-A3B"),
    (4096, 94, 64, 4, 12288, 151936): ("qwen3", "235B-A22B"),
    (2048, 27, 16, 16, 10944, 102400): ("deepseek_v3", "16B"),
    (5120, 60, 128, 128, 12288, 102400): ("deepseek_v3", "236B"),
    (7168, 61, 128, 128, 18432, 129280): ("deepseek_v3", "671B"),
}
SCHEDULES = {
    Schedule.GPIPE: "GPipe",
    Schedule.ONE_F_ONE_B: "1F1B",
    Schedule.INTERLEAVED: "Interleaved1F1B",
    Schedule.ZERO_BUBBLE: "InterleavedZeroBubble",
    Schedule.ZBV: "ZBVZeroBubble",
    Schedule.DUALPIPEV: "DualPipeV",
}
FULLY_SHARDED = 2  # from this stage on, parameters live in shards
REPLICATED = 0

Table = dict[str, Value]


def emit_torchtitan(
    model: ModelSpec, job: TrainingJob, cluster: Cluster, layout: Layout
) -> Emission:
    """Return the TOML and launcher for torchtitan.

    Raises:
        CannotExpress: torchtitan has no such model, or no option for a part of the plan.

    """
    name, flavor = _flavor(model)
    if layout.rank_order != AXES:
        raise _cannot(f"the rank order {','.join(layout.rank_order)}", "use tp,cp,dp,pp")
    if layout.pipeline_parallel > 1 and name == "qwen3":
        raise _cannot("a pipeline of Qwen3 (it has none)", "use --pp 1")
    converters, quantize = _precision(job)
    tables: dict[str, Table] = {
        "job": {"description": comment(model.name)},
        "model": {"name": name, "flavor": flavor, "converters": converters},
        "optimizer": {"name": _optimizer(job), "lr": 3e-4, "eps": 1e-8},
        "training": _training(job, layout),
        "parallelism": {**_sharding(layout), **_axes(job, layout), **_stages(layout)},
        "activation_checkpoint": _recompute(layout),
        "compile": {"enable": _compiles(job), "components": ["model", "loss"]},
        **quantize,
    }
    environment = (
        Variable(
            name="PYTORCH_CUDA_ALLOC_CONF",
            value="expandable_segments:True",
            reason="Less memory lost to fragmentation; torchtitan's own launcher sets it.",
        ),
    )
    program = (*torchrun(cluster), "-m", "torchtitan.train")
    config = Options(
        name="CONFIG_ARGS",
        why="Model, sharding and schedule are in the TOML; dataset and tokenizer are yours to set.",
        options=(("--job.config_file", PurePosixPath(CONFIG)),),
    )
    title = f"torchtitan 0.2: {model.name}"
    return Emission(
        target=Target.TORCHTITAN,
        files=(
            EmittedFile(path=CONFIG, text=_toml(title, tables)),
            *launch_files(title, cluster, program, (config,), environment),
        ),
        environment=environment,
        command=command_of(program, (config,)),
    )


def _cannot(what: str, remedy: str = "") -> CannotExpress:
    return CannotExpress(Target.TORCHTITAN, what, remedy)


def _flavor(model: ModelSpec) -> tuple[str, str]:
    shape = (
        model.hidden_size,
        model.num_layers,
        model.num_attention_heads,
        model.num_kv_heads,
        model.ffn_hidden_size,
        model.vocab_size,
    )
    if shape not in FLAVORS:
        known = ", ".join(f"{name} {flavor}" for name, flavor in FLAVORS.values())
        raise _cannot(f"the model {comment(model.name)}: its shape is none of {known}")
    return FLAVORS[shape]


def _training(job: TrainingJob, layout: Layout) -> Table:
    """Without a pipeline the local batch is one micro-batch; a pipeline cuts it into them."""
    local = layout.micro_batch_size
    if layout.pipeline_parallel > 1:
        local *= layout.num_micro_batches
    offloads = Offload.PARAMETERS in layout.offload
    if job.lora_rank is not None:
        raise _cannot("adapters (--lora-rank)", "leave --lora-rank out")
    if job.chunked_loss:
        raise _cannot("a chunked loss (--loss chunked)", "use --loss full")
    if job.grad_dtype == "bf16":
        raise _cannot("gradients reduced in bf16 (--grad-dtype bf16)", "use --grad-dtype fp32")
    return {
        "local_batch_size": local,
        "global_batch_size": job.global_batch_size,
        "seq_len": job.seq_len,
        "steps": 100,
        "dtype": "bfloat16" if job.optimizer is Optimizer.ADAMW_BF16 else "float32",
        "mixed_precision_param": "float32" if job.precision is Precision.FP32 else "bfloat16",
        "mixed_precision_reduce": "float32",
        "enable_cpu_offload": offloads,
    }


def _sharding(layout: Layout) -> Table:
    data, context = layout.data_parallel, layout.context_parallel
    is_split = layout.tensor_parallel * layout.pipeline_parallel * context > 1
    if layout.zero_stage == REPLICATED:
        if data > 1 and is_split:
            raise _cannot("replicas (--zero 0) beside another axis", "use --zero 3")
        if context > 1:
            raise _cannot(
                "whole parameters (--zero 0) with --cp; it shards over cp", "use --zero 3"
            )
        shards = 1
    else:
        if layout.zero_group % context:
            what = f"a ZeRO group of {layout.zero_group} with context parallel {context}"
            raise _cannot(what, f"use a multiple of {context}")
        shards = layout.zero_group // context
    keeps = layout.zero_stage == FULLY_SHARDED
    return {
        "data_parallel_replicate_degree": data // shards,
        "data_parallel_shard_degree": shards,
        # The default frees parameters after forward, except under a pipeline.
        "fsdp_reshard_after_forward": "never" if keeps else "default",
    }


def _axes(job: TrainingJob, layout: Layout) -> Table:
    if layout.tensor_parallel > 1 and not layout.sequence_parallel:
        raise _cannot("tensor parallelism without sequence parallelism", "use --sequence-parallel")
    if layout.context_parallel_type is ContextParallelType.ULYSSES and layout.context_parallel > 1:
        raise _cannot("Ulysses context parallelism", "use --cp-type ring or all-gather")
    options: Table = {
        "tensor_parallel_degree": layout.tensor_parallel,
        "enable_async_tensor_parallel": job.switches.overlap_tensor_parallel and _compiles(job),
        "context_parallel_degree": layout.context_parallel,
        "expert_parallel_degree": layout.expert_parallel,
        "expert_tensor_parallel_degree": layout.expert_tensor_parallel,
    }
    if layout.context_parallel > 1:
        is_ring = layout.context_parallel_type is ContextParallelType.RING
        options["context_parallel_rotate_method"] = "alltoall" if is_ring else "allgather"
    if layout.expert_parallel > 1:
        backends = {"alltoall": "standard", "deepep": "deepep"}
        if job.switches.expert_dispatch not in backends:
            raise _cannot(f"expert dispatch {job.switches.expert_dispatch!r}")
        options["expert_parallel_comm_backend"] = backends[job.switches.expert_dispatch]
    return options


def _stages(layout: Layout) -> Table:
    options: Table = {"pipeline_parallel_degree": layout.pipeline_parallel}
    if layout.pipeline_parallel == 1:
        return options
    if layout.schedule is Schedule.DUALPIPEV and layout.recompute is not Recompute.NONE:
        options["pipeline_parallel_expert_parallel_overlap"] = False  # it excludes recomputation
    return options | {
        "pipeline_parallel_schedule": SCHEDULES[layout.schedule],
        "pipeline_parallel_microbatch_size": layout.micro_batch_size,
        "module_fqns_per_model_part": modules_of_stages(layout.layers_per_stage),
    }


def modules_of_stages(split: tuple[int, ...]) -> list[list[str]]:
    """Return the modules of each global stage by torchtitan's names, ends included."""
    starts = [sum(split[:stage]) for stage in range(len(split))]
    stages = [
        [f"layers.{layer}" for layer in range(start, start + count)]
        for start, count in zip(starts, split, strict=True)
    ]
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "output"]
    return stages


def _recompute(layout: Layout) -> Table:
    if layout.recompute is Recompute.SELECTIVE:
        options = {(): "op", ("per-op",): "op", ("every-2nd-layer",): "2"}
        if layout.recompute_modules not in options:
            modules = ",".join(layout.recompute_modules)
            raise _cannot(f"recomputing {modules}; its selective policy is per operation")
        return {"mode": "selective", "selective_ac_option": options[layout.recompute_modules]}
    if layout.recompute_layers not in (0, max(layout.layers_per_stage)):
        raise _cannot(f"recomputing {layout.recompute_layers} layers per stage", "use all or none")
    return {"mode": layout.recompute.value}


def _optimizer(job: TrainingJob) -> str:
    if job.optimizer in (Optimizer.ADAMW, Optimizer.ADAMW_BF16):
        return "AdamW"
    raise _cannot(f"the optimizer {job.optimizer.value}", "use --optimizer adamw")


def _compiles(job: TrainingJob) -> bool:
    """Quantised products are slower than bf16 unless compiled; else as the job says."""
    return bool(job.switches.compile) or job.precision in (Precision.FP8, Precision.MXFP8)


def _precision(job: TrainingJob) -> tuple[list[str], dict[str, Table]]:
    if job.precision in (Precision.BF16, Precision.FP32):
        return [], {}
    scales = "rowwise" if job.switches.rowwise_fp8 else "tensorwise"  # as the estimate prices them
    recipes: dict[Precision, tuple[str, Table]] = {
        Precision.FP8: ("quantize.linear.float8", {"recipe_name": scales}),
        Precision.MXFP8: ("quantize.linear.mx", {"recipe_name": "mxfp8_cublas"}),
    }
    if job.precision not in recipes:
        raise _cannot(f"training in {job.precision.value}", "use --precision bf16, fp8 or mxfp8")
    converter, recipe = recipes[job.precision]
    if job.precision is Precision.FP8 and job.switches.fp8_all_gather:
        recipe = {
            "recipe_name": "tensorwise",
            "enable_fsdp_float8_all_gather": True,
            "precompute_float8_dynamic_scale_for_fsdp": True,
        }
    return [converter], {converter: recipe | {"filter_fqns": ["output"]}}  # the head stays bf16


def _toml(title: str, tables: Mapping[str, Table]) -> str:
    lines = [f"# {comment(title)}", "# Rates, steps and data are placeholders."]
    for name, table in tables.items():
        lines += ["", f"[{name}]"]
        lines += [f"{key} = {toml_value(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"
