"""Flags that verbs share, and what they say: model, cluster, job, layout.

Only argparse and plain enumerations are imported at module level, so that `--help` stays fast.
"""

import argparse
from argparse import ArgumentParser, Namespace
from math import prod
from typing import Any

from costmodels.hardware import Cluster, HardwareProfile
from costmodels.job import Optimizer, Precision, Switches, Target, TrainingJob
from costmodels.layout import (
    AXES,
    ContextParallelType,
    Layout,
    Offload,
    Recompute,
    Schedule,
    split_layers,
)
from costmodels.model import ModelSpec
from costmodels.units import GIB
from planner.cli.values import counts, gibibytes, offloads, positive, rank_order
from planner.meanings import MEANINGS

DEFAULT_SEQ_LEN = 8192
DEFAULT_TOKENS = 4 * 2**20  # tokens per step where --global-batch-size is left out
MAX_STAGES = 2**16  # chosen: beyond any pipeline, and a split of so many can still be listed

# Axis, long name, short name: both spellings work everywhere.
DEGREES = (
    ("data_parallel", "--data-parallel", "--dp"),
    ("tensor_parallel", "--tensor-parallel", "--tp"),
    ("pipeline_parallel", "--pipeline-parallel", "--pp"),
    ("context_parallel", "--context-parallel", "--cp"),
    ("expert_parallel", "--expert-parallel", "--ep"),
    ("expert_tensor_parallel", "--expert-tensor-parallel", "--etp"),
    ("micro_batch_size", "--micro-batch-size", "--mbs"),
    ("stages_per_rank", "--stages-per-rank", "--vpp"),
)


def add_input_flags(
    parser: ArgumentParser, *, gpus: str = "total GPUs", required: bool = True
) -> None:
    """Add the flags that name the model, the cluster and the job."""
    parser.add_argument(
        "--model",
        required=required,
        metavar="M",
        help="preset, config.json, TOML, or package.module:function returning an nn.Module",
    )
    parser.add_argument("--hardware", default="h100-sxm-80gb", metavar="H", help="profile or TOML")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="KEY=VALUE",
        help="override one profile key, e.g. links.inter_node.gb_per_s=12.5; repeatable",
    )
    parser.add_argument("--gpus", required=required, metavar="N", help=gpus)
    parser.add_argument("--gpus-per-node", type=positive, metavar="N", help="node size")
    parser.add_argument("--seq-len", type=positive, metavar="TOKENS", help="tokens per sequence")
    parser.add_argument(
        "--global-batch-size", type=positive, metavar="SEQUENCES", help="sequences per step"
    )
    _add_choice(parser, "--precision", Precision, Precision.BF16, help="format of matrix products")
    parser.add_argument(
        "--attention",
        choices=("flash", "unfused"),
        default="flash",
        help="unfused writes the scores to memory",
    )
    _add_choice(
        parser, "--optimizer", Optimizer, Optimizer.ADAMW, help="decides what its states take"
    )
    parser.add_argument(
        "--grad-dtype", choices=("fp32", "bf16"), help="of gradients (default: the target's)"
    )
    parser.add_argument(
        "--loss",
        choices=("full", "chunked"),
        default="full",
        help="chunked never holds the logits whole",
    )
    parser.add_argument("--lora-rank", type=positive, metavar="R", help="train adapters only")
    parser.add_argument(
        "--memory-taken-gib",
        type=gibibytes,
        default=0.0,
        metavar="GIB",
        help="taken on each GPU by something else",
    )
    _add_choice(
        parser, "--target", Target, Target.NATIVE, help="framework whose rules and habits hold"
    )


def add_layout_flags(parser: ArgumentParser) -> None:
    """Add the flags of one layout, as `estimate` takes them."""
    for name, long, short in DEGREES:
        parser.add_argument(short, long, dest=name, type=positive, metavar="N", help=MEANINGS[name])
    parser.add_argument(
        "--zero",
        type=int,
        choices=(0, 1, 2, 3),
        default=0,
        dest="zero_stage",
        help=MEANINGS["zero_stage"],
    )
    parser.add_argument(
        "--zero-group",
        type=positive,
        metavar="RANKS",
        help=f"{MEANINGS['zero_group']} (default: all of dp x cp)",
    )
    parser.add_argument("--keep-gathered", action="store_true", help=MEANINGS["keep_gathered"])
    _add_choice(parser, "--schedule", Schedule, None, help=MEANINGS["schedule"])
    _add_choice(parser, "--recompute", Recompute, Recompute.NONE, help=MEANINGS["recompute"])
    parser.add_argument(
        "--recompute-layers", type=positive, metavar="N", help=MEANINGS["recompute_layers"]
    )
    parser.add_argument(
        "--sequence-parallel",
        action=argparse.BooleanOptionalAction,
        help=f"{MEANINGS['sequence_parallel']} (default: where tp is above 1)",
    )
    _add_choice(
        parser,
        "--cp-type",
        ContextParallelType,
        ContextParallelType.RING,
        help=MEANINGS["context_parallel_type"],
    )
    parser.add_argument(
        "--offload",
        type=offloads,
        default=(),
        metavar="PARTS",
        help=f"{MEANINGS['offload']}: none, or a comma list of {', '.join(Offload)}",
    )
    parser.add_argument(
        "--layers-per-stage",
        type=counts,
        metavar="N,N,...",
        help=f"{MEANINGS['layers_per_stage']} (default: as even as they go)",
    )
    parser.add_argument(
        "--rank-order",
        type=rank_order,
        metavar="AXES",
        help=f"axes from the fastest-varying to the slowest, as {','.join(AXES)}; "
        "default: the fastest order",
    )


def read_model_flag(arguments: Namespace) -> ModelSpec:
    """Return the model that --model names; ValueError where there is none."""
    from planner.presets import ModelFunctionReference, read_model

    try:
        return read_model(arguments.model)
    except ModelFunctionReference:
        from planner.cli.modules import traced_model

        return traced_model(arguments.model, arguments.verb)


def read_hardware_flags(arguments: Namespace) -> HardwareProfile:
    """Return the profile that --hardware and --set describe."""
    from costmodels.profiles.reader import read_profile

    return read_profile(arguments.hardware, tuple(arguments.overrides))


def read_cluster(arguments: Namespace, profile: HardwareProfile) -> Cluster:
    """Return the cluster that --gpus and --gpus-per-node describe."""
    from costmodels.profiles.reader import make_cluster

    try:
        gpus = positive(arguments.gpus)
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"--gpus: {error}") from None
    return make_cluster(profile, gpus, arguments.gpus_per_node)


def read_job(
    arguments: Namespace, model: ModelSpec, batch_multiple: int, per_forward: int = 1
) -> TrainingJob:
    """Return the job that the flags describe.

    Args:
        arguments: Parsed flags.
        model: Gives the default length.
        batch_multiple: Where no batch is given, the default is moved to a multiple of this.
        per_forward: Sequences of one forward on all ranks; a default batch that cannot be moved
            so far is moved to a multiple of these.

    """
    seq_len = arguments.seq_len or min(model.training_seq_len, DEFAULT_SEQ_LEN)
    flash = arguments.attention == "flash"
    return TrainingJob(
        seq_len=seq_len,
        global_batch_size=arguments.global_batch_size
        or default_batch(seq_len, batch_multiple, per_forward),
        precision=Precision(arguments.precision),
        flash_attention=flash,
        optimizer=Optimizer(arguments.optimizer),
        grad_dtype=arguments.grad_dtype,
        chunked_loss=arguments.loss == "chunked",
        lora_rank=arguments.lora_rank,
        memory_taken=round(arguments.memory_taken_gib * GIB),
        target=Target(arguments.target),
        switches=Switches() if flash else Switches(attention_kernel="torch-softmax"),
    )


def default_batch(seq_len: int, multiple: int, per_forward: int = 1) -> int:
    """Return about 4 M tokens in sequences, as a multiple where that stays within a factor 2.

    Where it does not, the nearest batch of whole forwards.
    """
    wanted = max(1, round(DEFAULT_TOKENS / seq_len))
    moved = _nearest_multiple(wanted, multiple)
    return moved if moved <= 2 * wanted else _nearest_multiple(wanted, per_forward)


def _nearest_multiple(number: int, step: int) -> int:
    return max(1, round(number / step)) * step


def read_data_parallel(arguments: Namespace, cluster: Cluster) -> int:
    """Return --dp, or as many copies as the other degrees leave room for."""
    if arguments.data_parallel is not None:
        return int(arguments.data_parallel)
    others = (arguments.tensor_parallel, arguments.pipeline_parallel, arguments.context_parallel)
    return max(1, cluster.num_gpus // int(prod(degree or 1 for degree in others)))


def read_layout(
    arguments: Namespace, model: ModelSpec, job: TrainingJob, cluster: Cluster
) -> Layout:
    """Return the layout that the flags describe, defaults filled in.

    A batch or world size that does not come out whole is kept visible: the counts are rounded
    down and the rules report both sides.
    """
    degree: dict[str, Any] = {name: getattr(arguments, name) or 1 for name, _, _ in DEGREES}
    degree["data_parallel"] = read_data_parallel(arguments, cluster)
    shards = degree["data_parallel"] * degree["context_parallel"]
    per_forward = degree["data_parallel"] * degree["micro_batch_size"]
    num_stages = degree["pipeline_parallel"] * degree["stages_per_rank"]
    split = arguments.layers_per_stage or _default_split(model.num_layers, num_stages)
    schedule = Schedule(arguments.schedule or _default_schedule(degree["stages_per_rank"]))
    # One tensor rank has nothing to split; Megatron switches it off there, too.
    splits = arguments.sequence_parallel is not False and degree["tensor_parallel"] > 1
    return Layout(
        **degree,
        zero_stage=arguments.zero_stage,
        zero_group=arguments.zero_group or shards,
        keep_gathered=arguments.keep_gathered,
        num_micro_batches=max(1, job.global_batch_size // per_forward),
        schedule=schedule,
        recompute=Recompute(arguments.recompute),
        recompute_layers=arguments.recompute_layers or 0,
        sequence_parallel=splits,
        context_parallel_type=ContextParallelType(arguments.cp_type),
        offload=arguments.offload,
        layers_per_stage=split,
    )


def _default_schedule(stages_per_rank: int) -> Schedule:
    return Schedule.ONE_F_ONE_B if stages_per_rank == 1 else Schedule.INTERLEAVED


def _default_split(num_layers: int, num_stages: int) -> tuple[int, ...]:
    # More stages than layers is for the rules to refuse, with both numbers; they need the list.
    if num_stages > MAX_STAGES:
        raise ValueError(
            f"--pp x --stages-per-rank makes {num_stages} stages of {num_layers} layers; "
            f"at most {MAX_STAGES} can be judged"
        )
    return split_layers(num_layers, num_stages)


def _add_choice(
    parser: ArgumentParser, flag: str, kind: type, default: object, **kwargs: str
) -> None:
    parser.add_argument(
        flag,
        choices=[member.value for member in kind],  # type: ignore[attr-defined]  # an enumeration
        default=default and str(default),
        **kwargs,  # type: ignore[arg-type]  # only help and dest come here
    )
