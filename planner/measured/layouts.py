"""The layouts that a row of measured runs may mean, preferred first.

Degrees are stated. Recomputation, micro-batch and stages per rank often are not: each then has
several readings, least recomputation first; the first that fits counts, the fastest of its kind.
"""

from dataclasses import replace

from costmodels.job import Target, TrainingJob
from costmodels.layout import Layout, Recompute, Schedule, split_layers
from costmodels.model import ModelSpec
from costmodels.parameters import matmul_parameters
from planner.measured.columns import Row, UnsupportedRowError, integer, runs_on

# Modules that are cheap to run again for the memory that they free (Megatron-Bridge's recipes for
# expert models).
CHEAP_MODULES = ("layernorm", "mla_up_proj", "moe_act")
# Software that cuts stages from a list in which embedding, final norm and head are layers too:
# Aleph-Alpha/scaling, `get_transformer_layer_specs` and `pipe_partition_uniform`.
NORM_COUNTS_TOO = ("aa-scaling",)


def read_layouts(
    row: Row, model: ModelSpec, job: TrainingJob, notes: list[str]
) -> tuple[Layout, ...]:
    """Return the layouts that a row may mean, preferred first.

    Args:
        row: One measured run.
        model: Its network.
        job: Its batch and target.
        notes: Assumptions are added here.

    Raises:
        UnsupportedRowError: The planner cannot express the row.

    """
    data_parallel, pipeline_parallel = integer(row, "dp"), integer(row, "pp")
    counts = _stages_per_rank(row, model, job, pipeline_parallel, notes)
    zero = _zero(row, data_parallel * integer(row, "cp"), notes)
    splits = [_with_stages(row, model, job, zero, count) for count in counts]
    readings = [
        one for split in splits for one in _recompute_readings(row, model, job.target, split)
    ]
    if _wraps_blocks(row, job.target):
        notes.append("share of recomputed blocks not stated: the fastest that fits")
    if not row["recompute"]:
        readings.sort(key=lambda one: tuple(Recompute).index(one.recompute))
        notes.append("recompute not stated: the least that fits")
    per_replica, rest = divmod(job.global_batch_size, data_parallel)
    if rest:
        raise UnsupportedRowError(
            f"global batch {job.global_batch_size} does not divide over {data_parallel} replicas"
        )
    sizes = _micro_batch_sizes(row, job.target, pipeline_parallel, per_replica, notes)
    return tuple(
        replace(reading, micro_batch_size=size, num_micro_batches=per_replica // size)
        for reading in readings
        for size in sizes
    )


def _with_stages(
    row: Row, model: ModelSpec, job: TrainingJob, zero: tuple[int, int], stages_per_rank: int
) -> Layout:
    """Return what a row states as a layout with a number of stages per rank."""
    tensor_parallel, pipeline_parallel = integer(row, "tp"), integer(row, "pp")
    zero_stage, zero_group = zero
    return Layout(
        data_parallel=integer(row, "dp"),
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        context_parallel=integer(row, "cp"),
        expert_parallel=integer(row, "ep", 1),
        expert_tensor_parallel=integer(row, "etp", 1),
        zero_stage=zero_stage,
        zero_group=zero_group,
        stages_per_rank=stages_per_rank,
        schedule=_schedule(row, stages_per_rank),
        sequence_parallel=tensor_parallel > 1 and row["sp"] != "0",
        layers_per_stage=_stages(row, model, job.target, pipeline_parallel * stages_per_rank),
        recompute_modules=tuple(row["recompute_modules"].split()),
    )


def _micro_batch_sizes(
    row: Row, target: Target, pipeline_parallel: int, per_replica: int, notes: list[str]
) -> tuple[int, ...]:
    """Return the micro-batches that a row may mean.

    Raises:
        UnsupportedRowError: A replica's sequences do not divide into them.

    """
    if row["micro_batch"]:
        sizes: tuple[int, ...] = (integer(row, "micro_batch"),)
    elif target is Target.TORCHTITAN and pipeline_parallel > 1:
        # Its default: a replica's batch in as many micro-batches as the pipeline has ranks.
        sizes = (max(1, per_replica // pipeline_parallel),)
        notes.append("micro-batch not stated: one for each rank of the pipeline")
    else:
        sizes = tuple(size for size in (1, 2, 4, 8) if per_replica % size == 0)
        notes.append("micro-batch not stated: the fastest that fits")
    if any(per_replica % size for size in sizes):
        raise UnsupportedRowError(
            f"{per_replica} sequences per replica do not divide into micro-batches of {sizes[0]}"
        )
    return sizes


def _stages_per_rank(
    row: Row, model: ModelSpec, job: TrainingJob, pipeline_parallel: int, notes: list[str]
) -> tuple[int, ...]:
    """Return how many stages a rank may hold: as stated, or what divides its layers.

    Megatron runs that state no schedule are tuned ones, which interleave where it pays.
    """
    if pipeline_parallel == 1:
        return (1,)
    stated = row["schedule"].lower()
    if row["vpp"] or stated not in ("", "interleaved-1f1b"):
        return (integer(row, "vpp", 1),)
    if not stated and job.target is not Target.MEGATRON:
        return (1,)
    layers, rest = divmod(model.num_layers, pipeline_parallel)
    several = tuple(v for v in range(2, layers + 1) if layers % v == 0 and not rest)
    if not stated:
        several = (1, *several)
    notes.append("stages per rank not stated: the fastest")
    return several or (1,)


def _wraps_blocks(row: Row, target: Target) -> bool:
    """Return whether "selective" means a share of whole blocks, as FSDP trainers wrap them."""
    return row["recompute"] == Recompute.SELECTIVE.value and target is Target.ACCELERATE


def _recompute_readings(
    row: Row, model: ModelSpec, target: Target, base: Layout
) -> tuple[Layout, ...]:
    """Return what a row may mean by its recomputation, least first.

    Where it says nothing: none; modules (those of Megatron's own recipes where there are experts or
    latent attention); then whole layers, a quarter of each stage more at a time.
    """
    if _wraps_blocks(row, target):
        most = max(base.layers_per_stage)
        counts = sorted({-(-most * quarters // 4) for quarters in (2, 3, 4)})
        full = replace(base, recompute=Recompute.FULL)
        return tuple(replace(full, recompute_layers=count) for count in counts)
    if row["recompute"]:
        return (replace(base, recompute=Recompute(row["recompute"])),)
    modules = [base.recompute_modules]
    if model.moe is not None or model.latent_attention is not None:
        modules.append(CHEAP_MODULES)
    most = max(base.layers_per_stage)
    counts = sorted({-(-most * quarters // 4) for quarters in (1, 2, 3)})
    return (
        base,
        *(
            replace(base, recompute=Recompute.SELECTIVE, recompute_modules=names)
            for names in modules
        ),
        *(
            replace(base, recompute=Recompute.FULL, recompute_layers=count)
            for count in counts
            if count <= min(base.layers_per_stage)
        ),
        replace(base, recompute=Recompute.FULL),
    )


def _zero(row: Row, shards: int, notes: list[str]) -> tuple[int, int]:
    if not row["zero"]:
        if shards > 1:
            notes.append("ZeRO not stated: taken as 1")
        return 1, shards
    stage, _, group = row["zero"].partition("/")
    return int(stage), min(int(group), shards) if group else shards


def _schedule(row: Row, stages_per_rank: int) -> Schedule:
    stated = row["schedule"].lower()
    if stated in ("", "1f1b", "interleaved-1f1b", "1f1b redis"):
        return Schedule.INTERLEAVED if stages_per_rank > 1 else Schedule.ONE_F_ONE_B
    if stated in {member.value for member in Schedule}:
        return Schedule(stated)
    raise UnsupportedRowError(f"schedule {row['schedule']!r} is outside the contract")


def _stages(row: Row, model: ModelSpec, target: Target, num_stages: int) -> tuple[int, ...]:
    tags = row["switches"].split()
    if "embedding-and-head-count-as-layers" in tags and num_stages > 1:
        counts = split_layers(model.num_layers + 2, num_stages)
        return (counts[0] - 1, *counts[1:-1], counts[-1] - 1)
    if runs_on(row, NORM_COUNTS_TOO) and num_stages > 1:
        return _uniform_stages(model, num_stages)
    # nanotron balances its stages by the work of their blocks.
    if ("uneven-stages" in tags or target is Target.NANOTRON) and num_stages > 1:
        return _balanced_stages(model, num_stages)
    return split_layers(model.num_layers, num_stages)


def _uniform_stages(model: ModelSpec, num_stages: int) -> tuple[int, ...]:
    """Cut embedding, blocks, final norm and head as one list; what is left goes to first stages."""
    base, rest = divmod(model.num_layers + 3, num_stages)
    counts = [base + (stage < rest) for stage in range(num_stages)]
    if counts[-1] <= 2:  # noqa: PLR2004 - norm and head
        raise UnsupportedRowError(f"{model.num_layers} layers leave the last stage none")
    return (counts[0] - 1, *counts[1:-1], counts[-1] - 2)


def _balanced_stages(model: ModelSpec, num_stages: int) -> tuple[int, ...]:
    """Spread layers so that the last stage's output head weighs as many layers as it works.

    The rows say that stages are uneven, not how; this is why anybody makes them so.
    """
    head = model.vocab_size * model.hidden_size
    layers = (matmul_parameters(model) - head) / model.num_layers
    share = (model.num_layers + head / layers) / num_stages
    last = max(1, round(share - head / layers))
    return (*split_layers(model.num_layers - last, num_stages - 1), last)
