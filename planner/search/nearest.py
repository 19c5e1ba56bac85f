"""Nothing fits: the layout that misses by least, what it lacks, and what would help.

The leanest layouts (all recomputed, states cut over every rank, as far as the constraints allow)
are ordered by their memory bound and the first of them judged exactly. Relaxations are tried one
at a time on the user's own constraints, in the order in which they cost speed or money.
"""

from dataclasses import dataclass, replace
from math import inf

import numpy as np

from costmodels.hardware import Cluster
from costmodels.job import TrainingJob
from costmodels.layout import Layout
from costmodels.layout_table import IntColumn, LayoutTable
from costmodels.model import ModelSpec
from costmodels.units import GIB
from planner.constraints import Constraints
from planner.judge import Judgement, judge
from planner.search.costs import Costs, ModelCosts
from planner.search.fewest import fewest_gpus, first_fit
from planner.search.priced import layout_of_row
from planner.search.space import Space, root, space_of, unfold

JUDGED = 48  # chosen: leanest layouts that are judged exactly
MOST_NODES = 512  # chosen: more nodes than this are not suggested

# Axis to free, and what people call it; in the order of what it costs.
RELAXATIONS = (
    ("recompute", "recompute more (--recompute full)"),
    ("micro_batch_size", "a smaller micro-batch (--mbs 1)"),
    ("context_parallel", "context parallelism (--cp)"),
    ("zero_stage", "more sharding (--zero 3)"),
    ("tensor_parallel", "another tensor parallel degree (--tp)"),
    ("pipeline_parallel", "another pipeline depth (--pp)"),
    ("expert_parallel", "another expert parallel degree (--ep)"),
    ("offload", "offload to host memory (--offload)"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """One change that makes the job fit.

    Attributes:
        change: In words, with the flag.
        layout: The fastest layout found under it.
        gpus: GPUs that it takes.

    """

    change: str
    layout: Layout
    gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestMiss:
    """The layout that comes closest to fitting.

    Attributes:
        lacking_gib: GiB above what the card, or the host, may hold.
        of_host: Whether host memory is what lacks.
        stage: Pipeline rank that is fullest.
        part: Its largest part.
        relaxations: What would help, cheapest first.

    """

    judgement: Judgement
    lacking_gib: float
    of_host: bool
    stage: int
    part: str
    relaxations: tuple[Relaxation, ...]


def nearest_miss(
    model: ModelSpec,
    job: TrainingJob,
    cluster: Cluster,
    constraints: Constraints,
    *,
    share: float = 1.0,
    safe_share: float = 1.0,
) -> NearestMiss | None:
    """Return what comes closest to fitting; None where no layout is legal.

    Args:
        model: The network.
        job: What is trained per step.
        cluster: The machine.
        constraints: What the user fixed.
        share: Share of the usable memory that may be reserved.
        safe_share: The same for what is suggested instead.

    """
    space = space_of(model, job, cluster, constraints)
    costs = ModelCosts.under(model, job, cluster, constraints)
    layout = _closest(space, costs, constraints, share)
    if layout is None:
        return None
    said = judge(model, job, cluster, layout)
    assert said.memory is not None
    parts = said.memory.parts
    short = parts.reserved - share * costs.capacity
    host_short = said.memory.host_per_node - costs.host_capacity
    named = ("parameters", "gradients", "optimizer", "activations", "logits", "transient")
    return NearestMiss(
        judgement=said,
        lacking_gib=(short if short > 0 else host_short) / GIB,
        of_host=short <= 0,
        stage=said.memory.worst_rank,
        part=max(named, key=lambda name: getattr(parts, name)),
        relaxations=_relaxations(model, job, cluster, constraints, safe_share),
    )


def _closest(space: Space, costs: Costs, constraints: Constraints, share: float) -> Layout | None:
    """Return the layout that exceeds memory by least."""
    rows = unfold(space, root(space), "stages_per_rank")
    if not len(rows.table):
        return None
    ascending = np.argsort(costs.memory_bound(_lean(space, rows.table)), kind="stable")
    block = rows.take(ascending[:JUDGED])
    table = unfold(space, block, "rank_order").table
    # Lighter last stages have lower bounds, and fill other ranks more than the even split.
    table = table.take(table.lighter_last == 0)
    if not len(table):
        return None
    bound = costs.memory_bound(table)
    best, least = None, inf
    for row in np.argsort(bound, kind="stable")[:JUDGED]:
        split = constraints.layers_per_stage
        layout = layout_of_row(table, int(row), space.model.num_layers)
        layout = layout if split is None else replace(layout, layers_per_stage=split)
        memory = costs.memory(layout)
        excess = max(memory.parts.reserved - share * costs.capacity, 0.0)
        excess += max(memory.host_per_node - costs.host_capacity, 0.0)
        if excess < least:
            best, least = layout, excess
    return best


def _lean(space: Space, table: LayoutTable) -> LayoutTable:
    """Return the table with the last ZeRO stage, recomputation and offload that the axes allow."""

    def last(axis: str) -> IntColumn:
        value = int(space.axes.named(axis).values[:, 0].max())
        return np.full(len(table), value, dtype=np.int64)

    return replace(
        table,
        zero_stage=last("zero_stage"),
        keep_gathered=np.full(len(table), space.axes.named("zero_stage").values[:, 1].min()),
        zero_group=table.data_parallel * table.context_parallel,
        recompute=last("recompute"),
    )


def _relaxations(
    model: ModelSpec, job: TrainingJob, cluster: Cluster, constraints: Constraints, share: float
) -> tuple[Relaxation, ...]:
    found = []
    for axis, change in RELAXATIONS:
        if getattr(constraints, axis) is None:
            continue
        free = replace(constraints, **{axis: None})  # type: ignore[arg-type]  # axes take None
        layout = first_fit(model, job, cluster, free, share)
        if layout is not None:
            found.append(Relaxation(change=change, layout=layout, gpus=cluster.num_gpus))
    more = _more_gpus(model, job, cluster, constraints, share)
    return (*found, *more)


def _more_gpus(
    model: ModelSpec, job: TrainingJob, cluster: Cluster, constraints: Constraints, share: float
) -> tuple[Relaxation, ...]:
    """Find the fewest GPUs, whole nodes above one, that fit (data parallel left open)."""
    node, has = cluster.gpus_per_node, cluster.num_gpus
    found = fewest_gpus(
        model,
        lambda _: job,
        cluster.profile,
        replace(constraints, data_parallel=None),
        share=share,
        node=node,
        low=has + 1 if has < node else (has // node + 1) * node,
        high=MOST_NODES * node,
    )
    if found is None:
        return ()
    change = f"more GPUs (--gpus {found.num_gpus})"
    return (Relaxation(change=change, layout=found.layout, gpus=found.num_gpus),)
