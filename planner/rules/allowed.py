"""The legal values of one field, everything else fixed: what a violation offers instead.

Candidates are tried against every rule of the target, as rows of one table. Three things follow a
candidate rather than staying fixed, since nobody states them apart: data_parallel fills the GPUs,
num_micro_batches fills the batch, and layers spread evenly where the number of stages changes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from costmodels.config_keys import MAX_COUNT
from costmodels.hardware import Cluster
from costmodels.job import Precision, TrainingJob
from costmodels.layout import (
    ContextParallelType,
    Layout,
    Offload,
    Recompute,
    Schedule,
    split_layers,
)
from costmodels.model import ModelSpec
from planner.rules.partition import broken_rules
from planner.rules.rule import Fact, Rule, sequence_multiple

DEGREES = (
    "tensor_parallel",
    "pipeline_parallel",
    "context_parallel",
    "expert_parallel",
    "expert_tensor_parallel",
)
OFFLOADS: tuple[tuple[Offload, ...], ...] = (
    (),
    (Offload.OPTIMIZER,),
    (Offload.OPTIMIZER, Offload.PARAMETERS),
    (Offload.ACTIVATIONS,),
    (Offload.OPTIMIZER, Offload.ACTIVATIONS),
    (Offload.OPTIMIZER, Offload.PARAMETERS, Offload.ACTIVATIONS),
)


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a positive integer, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def allowed_values(
    field: str,
    rules: Sequence[Rule],
    case: tuple[ModelSpec, TrainingJob, Cluster],
    layout: Layout,
) -> tuple[Fact, ...]:
    """Return the values of a field for which the layout obeys every rule.

    Args:
        field: A field of Layout, or "precision", "seq_len", "global_batch_size", "gpus".
        rules: The target's rules.
        case: Model, job and cluster.
        layout: The layout that breaks a rule; degrees at least 1.

    """
    model, job, cluster = case
    if field == "gpus":
        return _nearest_multiples(cluster.num_gpus, cluster.gpus_per_node)
    if field in ("precision", "seq_len", "global_batch_size"):
        return tuple(
            getattr(other, field)
            for other in _jobs(field, job, layout)
            if not any(broken_rules(rules, (model, other, cluster), [_rebatched(layout, other)]))
        )
    candidates = list(_layouts(field, model, job, cluster, layout))
    broken = broken_rules(rules, case, [candidate for _, candidate in candidates])
    return tuple(value for (value, _), found in zip(candidates, broken, strict=True) if not found)


def _jobs(field: str, job: TrainingJob, layout: Layout) -> Iterator[TrainingJob]:
    if field == "precision":
        for precision in Precision:
            yield replace(job, precision=precision)
    elif field == "seq_len":
        for length in _nearest_multiples(job.seq_len, sequence_multiple(layout)):
            yield replace(job, seq_len=length)
    else:
        step = layout.micro_batch_size * layout.data_parallel
        for batch in _nearest_multiples(job.global_batch_size, step):
            yield replace(job, global_batch_size=batch)


def _nearest_multiples(number: int, step: int) -> tuple[int, ...]:
    below = number // step * step
    return tuple(m for m in dict.fromkeys((below, -(-number // step) * step)) if 0 < m <= MAX_COUNT)


def _layouts(
    field: str, model: ModelSpec, job: TrainingJob, cluster: Cluster, layout: Layout
) -> Iterator[tuple[Fact, Layout]]:
    for value in _candidates(field, model, job, cluster, layout):
        if field == "offload":
            parts = OFFLOADS[value] if isinstance(value, int) else ()
            yield ",".join(parts) or "none", replace(layout, offload=parts)
            continue
        if field == "layers_per_stage":
            even = split_layers(model.num_layers, layout.num_stages)
            yield even, replace(layout, layers_per_stage=even)
            continue
        changed = replace(layout, **{field: value})  # type: ignore[arg-type]  # a field's own values
        yield value, _rederived(changed, field, model, job, cluster, before=layout)


def _candidates(
    field: str, model: ModelSpec, job: TrainingJob, cluster: Cluster, layout: Layout
) -> Sequence[Fact]:
    if field in DEGREES or field == "data_parallel":
        return divisors(cluster.num_gpus)
    candidates: dict[str, Sequence[Fact]] = {
        "schedule": tuple(Schedule),
        "recompute": tuple(Recompute),
        "context_parallel_type": tuple(ContextParallelType),
        "sequence_parallel": (False, True),
        "keep_gathered": (False, True),
        "zero_stage": (0, 1, 2, 3),
        "zero_group": divisors(layout.data_parallel * layout.context_parallel),
        "micro_batch_size": divisors(job.global_batch_size),
        "stages_per_rank": range(1, model.num_layers // layout.pipeline_parallel + 1),
        "offload": range(len(OFFLOADS)),
        "layers_per_stage": (0,),
        "recompute_layers": range(1, max(layout.layers_per_stage, default=0) + 1),
    }
    return candidates[field]


def _rederived(
    layout: Layout,
    field: str,
    model: ModelSpec,
    job: TrainingJob,
    cluster: Cluster,
    *,
    before: Layout,
) -> Layout:
    """Let what nobody states apart follow a changed field."""
    if field in DEGREES:
        others = layout.num_gpus // layout.data_parallel
        layout = replace(layout, data_parallel=max(1, cluster.num_gpus // others))
    if field == "tensor_parallel" and before.tensor_parallel == 1:
        layout = replace(layout, sequence_parallel=layout.tensor_parallel > 1)
    if before.zero_group == before.data_parallel * before.context_parallel:
        whole = layout.data_parallel * layout.context_parallel
        layout = layout if field == "zero_group" else replace(layout, zero_group=whole)
    if layout.num_stages != before.num_stages:
        even = split_layers(model.num_layers, layout.num_stages)
        layout = replace(layout, layers_per_stage=even)
    return _rebatched(layout, job)


def _rebatched(layout: Layout, job: TrainingJob) -> Layout:
    per_micro_batch = layout.micro_batch_size * layout.data_parallel
    return replace(layout, num_micro_batches=max(1, job.global_batch_size // per_micro_batch))
