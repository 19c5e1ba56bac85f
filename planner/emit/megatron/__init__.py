"""Megatron-LM: a plan as arguments of `pretrain_gpt.py`, a launcher and the environment.

Source: NVIDIA/Megatron-LM `megatron/training/arguments.py`, Megatron-Core 0.15 (October 2025).
"""

from costmodels.hardware import Cluster
from costmodels.job import Target, TrainingJob
from costmodels.layout import Layout
from costmodels.model import ModelSpec
from costmodels.network.shard import padded_rows
from planner.emit.emission import CannotExpress, Emission, Variable
from planner.emit.launch import Options, command_of, launch_files, torchrun
from planner.emit.megatron.memory import memory_options, optimizer_options
from planner.emit.megatron.model import Option, model_options
from planner.emit.megatron.parallel import FSDP_STAGE, parallel_options


def emit_megatron(model: ModelSpec, job: TrainingJob, cluster: Cluster, layout: Layout) -> Emission:
    """Return launcher and arguments for Megatron-LM.

    Raises:
        CannotExpress: Megatron-LM has no option for a part of the plan.

    """
    if job.lora_rank is not None:
        raise CannotExpress(Target.MEGATRON, "adapters (--lora-rank)", "leave --lora-rank out")
    if job.chunked_loss:
        raise CannotExpress(Target.MEGATRON, "a chunked loss (--loss chunked)", "use --loss full")
    padded_vocab = padded_rows(model, Target.MEGATRON, layout.tensor_parallel)
    groups = (
        Options(name="MODEL_ARGS", why="The network.", options=model_options(model, job)),
        Options(
            name="PARALLEL_ARGS",
            why="How a step is spread over the GPUs; data parallelism is what the rest leaves.",
            options=parallel_options(model, job, layout),
        ),
        Options(
            name="BATCH_ARGS",
            why=f"{layout.num_micro_batches} micro-batches per step and pipeline.",
            options=_batch(job, layout),
        ),
        Options(
            name="MEMORY_ARGS",
            why="Number formats, recomputation, offload.",
            options=memory_options(model, job, layout),
        ),
        Options(
            name="OPTIMIZER_ARGS",
            why="Rates are placeholders; the planner knows of their memory only.",
            options=optimizer_options(job, layout),
        ),
        Options(
            name="DATA_ARGS",
            why="Random tokens of the model's vocabulary; put your data and tokenizer here.",
            options=(
                ("--mock-data",),
                ("--tokenizer-type", "NullTokenizer"),
                ("--vocab-size", str(model.vocab_size - 1)),  # this tokenizer adds one: end of text
                ("--padded-vocab-size", str(padded_vocab)),
            ),
        ),
    )
    environment = _environment(job, cluster, layout)
    program = (*torchrun(cluster), "pretrain_gpt.py")
    return Emission(
        target=Target.MEGATRON,
        files=launch_files(f"Megatron-LM: {model.name}", cluster, program, groups, environment),
        environment=environment,
        command=command_of(program, groups),
    )


def _batch(job: TrainingJob, layout: Layout) -> tuple[Option, ...]:
    options: list[Option] = [
        ("--seq-length", str(job.seq_len)),
        ("--micro-batch-size", str(layout.micro_batch_size)),
        ("--global-batch-size", str(job.global_batch_size)),
        ("--train-iters", "100"),
        ("--log-interval", "1"),
        ("--log-throughput",),
        ("--eval-iters", "0"),
    ]
    return tuple(options)


def _environment(job: TrainingJob, cluster: Cluster, layout: Layout) -> tuple[Variable, ...]:
    variables = [
        Variable(
            name="NVTE_ALLOW_NONDETERMINISTIC_ALGO",
            value="1",
            reason="Transformer Engine may pick its fastest kernels.",
        )
    ]
    is_split = layout.tensor_parallel > 1 or layout.context_parallel > 1
    before_blackwell = cluster.profile.generation in ("volta", "ampere", "ada", "hopper")
    if is_split and before_blackwell and layout.zero_stage < FSDP_STAGE:
        variables.append(
            Variable(
                name="CUDA_DEVICE_MAX_CONNECTIONS",
                value="1",
                reason="Kernels start in the order of their launch, so that collectives of tensor "
                "and context parallelism overlap; Megatron refuses to start without it.",
            )
        )
    if not job.switches.cuda_graphs:
        variables.append(
            Variable(
                name="PYTORCH_CUDA_ALLOC_CONF",
                value="expandable_segments:True",
                reason="Less memory lost to fragmentation.",
            )
        )
    return tuple(variables)
