"""Honest advice about a search's answer, where a ranking alone would mislead.

near ties           rows closer to each other than the estimate is sure of
do not shard        the model fits on each GPU and is only copied
nodes do not pay    fewer nodes train as fast, and the bandwidth from which that turns
unfilled pipeline   the batch leaves stages idle
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from costmodels.hardware import Cluster, make_cluster
from costmodels.job import TrainingJob
from costmodels.layout import Layout, Recompute, Schedule
from costmodels.model import ModelSpec
from costmodels.units import GB
from planner.constraints import Constraints
from planner.judge import Judgement, judge
from planner.search.ranking import search

MUCH_COMMUNICATION = 0.3  # chosen: from this share of a step on, fewer nodes are tried
MUCH_BUBBLE = 0.1  # chosen: a pipeline that idles more than this is called unfilled
GOOD_BUBBLE = 0.05  # chosen: the bubble that a larger batch is suggested for
MOST_BANDWIDTH = 2.0**10  # chosen: no network is a thousand times as fast as another
HALVINGS = 13  # chosen: 1024 ** 2**-13, to a thousandth of the bandwidth


def advice(
    model: ModelSpec,
    job: TrainingJob,
    cluster: Cluster,
    plans: Sequence[Judgement],
    constraints: Constraints,
) -> tuple[str, ...]:
    """Return sentences that an engineer should read before launching row 1.

    Args:
        model: The network.
        job: What is trained.
        cluster: The machine.
        plans: The ranking, best first, at least one.
        constraints: What the user fixed.

    """
    best = plans[0]
    said = [
        _near_ties(plans),
        _unsharded(best.layout),
        _unfilled(best),
        _nodes(model, job, cluster, plans, constraints),
    ]
    return tuple(words for words in said if words)


def mechanisms(layout: Layout) -> int:
    """Count what has to be set up beyond plain data parallelism."""
    return sum(
        (
            layout.tensor_parallel > 1,
            layout.pipeline_parallel > 1,
            layout.pipeline_parallel > 1 and layout.schedule is not Schedule.ONE_F_ONE_B,
            layout.stages_per_rank > 1,
            layout.context_parallel > 1,
            layout.expert_parallel > 1,
            layout.expert_tensor_parallel > 1,
            layout.zero_stage > 1,
            0 < layout.zero_group < layout.data_parallel * layout.context_parallel,
            layout.recompute is not Recompute.NONE,
            layout.recompute_layers > 0,
            *(True for _ in layout.offload),
        )
    )


def _near_ties(plans: Sequence[Judgement]) -> str | None:
    """Name the simplest of the rows that the estimate cannot tell from row 1."""
    first = plans[0].time
    assert first is not None
    unsure = first.interval[1] / first.step_seconds
    tied = [plan for plan in plans if plan.time and plan.time.step_seconds < first.interval[1]]
    if len(tied) < 2:  # noqa: PLR2004 - one row ties with nothing
        return None
    last = tied[-1].time
    assert last is not None
    apart = last.step_seconds / first.step_seconds - 1
    effort = [(mechanisms(one.layout), one.layout.stages_per_rank) for one in tied]
    simplest = effort.index(min(effort))
    words = (
        f"rows 1 to {len(tied)} lie within {100 * apart:.1f} %, closer than the estimate is sure "
        f"of ({100 * (unsure - 1):.0f} %)"
    )
    if simplest == 0:
        return f"{words}; row 1 is also the simplest to set up"
    return f"{words}; row {simplest + 1} is the simplest to set up"


def _unsharded(layout: Layout) -> str | None:
    splits = layout.tensor_parallel * layout.pipeline_parallel * layout.context_parallel
    if splits * layout.expert_parallel > 1 or layout.zero_stage or layout.data_parallel == 1:
        return None
    return "the whole model fits on each GPU: do not shard it, copy it (plain data parallelism)"


def _unfilled(best: Judgement) -> str | None:
    layout, time = best.layout, best.time
    assert time is not None
    stages, counts = layout.pipeline_parallel, layout.num_micro_batches
    if stages == 1 or time.bubble_fraction < MUCH_BUBBLE:
        return None
    # (p - 1) / (v m) of ideal time is idle with v stages per rank.
    wanted = ceil((stages - 1) / layout.stages_per_rank / GOOD_BUBBLE)
    bubble = f"{100 * time.bubble_fraction:.0f} % of the step is bubble"
    if wanted <= counts:
        idle = time.bubble_fraction * time.step_seconds
        transfers = sum(term.exposed_seconds for term in time.terms if term.name == "p2p")
        waits = transfers > idle / 2
        cause = "ranks wait for transfers" if waits else "stages are not equally heavy"
        return f"{bubble}, though micro-batches fill the {stages} pipeline ranks: {cause}"
    batch = wanted * layout.data_parallel * layout.micro_batch_size
    return (
        f"{counts} micro-batches do not fill {stages} pipeline ranks: {bubble}; a batch of about "
        f"{batch} sequences would leave {100 * GOOD_BUBBLE:.0f} %"
    )


def _nodes(
    model: ModelSpec,
    job: TrainingJob,
    cluster: Cluster,
    plans: Sequence[Judgement],
    constraints: Constraints,
) -> str | None:
    """Compare with one node where communication takes much of the step."""
    time, node = plans[0].time, cluster.gpus_per_node
    assert time is not None
    if cluster.num_gpus <= node or time.exposed_communication_fraction < MUCH_COMMUNICATION:
        return None
    alone = make_cluster(cluster.profile, node, node)
    found = search(model, job, alone, constraints, top=1, only_fitting=True)
    if not found.plans or found.plans[0].time is None:
        return None
    one, nodes = found.plans[0].time.step_seconds, cluster.num_gpus // node
    faster = one / time.step_seconds
    if faster >= 1:
        return f"{nodes} nodes train {faster:.2f} times as fast as one: the network holds them"
    words = (
        f"{nodes} nodes are slower than one: {time.step_seconds:.3g} s a step, one node takes "
        f"{one:.3g} s"
    )
    turn = _turning_bandwidth(model, job, cluster, plans, one)
    if turn is None:
        return words
    has = cluster.profile.inter_node.bandwidth / GB
    return f"{words}; they win from {turn / GB:.3g} GB/s per GPU between nodes on (here {has:.3g})"


def _turning_bandwidth(
    model: ModelSpec, job: TrainingJob, cluster: Cluster, plans: Sequence[Judgement], least: float
) -> float | None:
    """Return bytes/s between nodes from which one of the listed layouts beats `least` seconds."""
    link = cluster.profile.inter_node

    def wins(bandwidth: float) -> bool:
        profile = replace(cluster.profile, inter_node=replace(link, bandwidth=bandwidth))
        there = replace(cluster, profile=profile)
        times = (judge(model, job, there, plan.layout).time for plan in plans)
        return any(time is not None and time.step_seconds < least for time in times)

    slow, fast = link.bandwidth, MOST_BANDWIDTH * link.bandwidth
    if wins(slow) or not wins(fast):
        return None
    for _ in range(HALVINGS):
        middle = (slow * fast) ** 0.5
        slow, fast = (slow, middle) if wins(middle) else (middle, fast)
    return fast
