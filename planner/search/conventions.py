"""What the search leaves out of the product besides illegal layouts, counted like rules.

    same_layout_twice   a choice that changes nothing (sequence parallelism at tp 1, a context
                        type at cp 1, a schedule without a pipeline, ZeRO over one rank, a rank
                        order with the same placement) keeps one name
    conventions         values of *free* axes that published runs never gain from
    constraints         what the user ruled out and no axis expresses

Each is a `Rule`, so the space applies them as soon as their columns are known.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from costmodels.hardware import Cluster
from costmodels.job import Target
from costmodels.layout import AXES, Schedule
from costmodels.layout_table import SCHEDULES, IntColumn, LayoutTable
from costmodels.time.layouts import FULL_CODE
from costmodels.time.placement import axis_strides, span
from costmodels.virtual_splits import head_in_layers, longest_stages
from planner.constraints import Constraints
from planner.rules.expressible import ALL_OR_NONE, expressible_rules
from planner.rules.rule import Case, Mask, Rule
from planner.search.axes import Axes

MOST_TOKENS_PER_FORWARD = 2**17  # chosen: matrix products are saturated far below
LEAST_TOKENS_PER_SLICE = 256  # chosen: a shorter slice of a sequence is all latency
LEAST_GAIN = 0.01  # chosen: of the slowest rank's work, for which a split counts; less is noise


def _rule(name: str, reads: tuple[str, ...], holds: Callable[[Case], Mask]) -> Rule:
    return Rule(name=name, reads=reads, holds=holds, says=name, given=(), blames=())


def conventions_of(axes: Axes, constraints: Constraints, target: Target) -> tuple[Rule, ...]:
    """Return every rule of the search that is not in the target's table."""
    return (*_one_name_each(axes), *_on_free_axes(axes), *_constraint_rules(constraints, target))


def domain_group(table: LayoutTable, cluster: Cluster) -> IntColumn:
    """Return the ranks of the data group (dp * cp) that share a domain in the usual rank order."""
    usual = replace(table, rank_orders=(AXES,))
    inner = _inner_sizes(usual, cluster, np.zeros(len(table), dtype=np.int64))
    return inner[0] * inner[1]


def _inner_sizes(
    table: LayoutTable, cluster: Cluster, code: IntColumn
) -> tuple[IntColumn, IntColumn, IntColumn]:
    """Return how many ranks of cp, dp and pp share a domain, under an order."""
    domain = min(cluster.scale_up_size, cluster.num_gpus)
    strides = axis_strides(replace(table, rank_order=code))
    context = span(domain, table.context_parallel, strides["cp"]).inner
    data = span(domain, table.data_parallel, strides["dp"]).inner
    return context, data, span(domain, table.pipeline_parallel, strides["pp"]).inner


def _first(axes: Axes, name: str) -> int:
    return int(axes.named(name).values[0, 0])


def _least(axes: Axes, name: str) -> int:
    return int(axes.named(name).values[:, 0].min())


def _plain_schedule(axes: Axes) -> int:
    """Return the schedule that stands for all where there is no pipeline."""
    codes = [int(code) for code in axes.named("schedule").values[:, 0]]
    plain = SCHEDULES.index(Schedule.ONE_F_ONE_B)
    return plain if plain in codes else codes[0]


def _orders_differ(case: Case) -> Mask:
    """Keep the first of the rank orders that place every group alike."""
    table, cluster = case.table, case.cluster
    mine = _inner_sizes(table, cluster, table.rank_order)
    first = case.always(holds=True)
    for code in range(len(table.rank_orders)):
        other = _inner_sizes(table, cluster, np.full(len(table), code))
        alike = np.logical_and.reduce([a == b for a, b in zip(mine, other, strict=True)])
        first &= ~(alike & (code < table.rank_order))
    return first


def _stages_are_alike(case: Case) -> Mask:
    """Whether stages are alike; where not even the ranks divide the layers, two are as good."""
    stages, layers = case.table.stages_per_rank, case.model.num_layers
    two = (stages == 2) & (layers % case.table.pipeline_parallel > 0)  # noqa: PLR2004
    alike: Mask = (stages == 1) | (layers % case.num_stages == 0) | two
    return alike


def _last_stage_gives(case: Case) -> Mask:
    """Whether the last stage has layers to give, and giving the last of them pays.

    The slowest rank's work counts, in layers: of n on each rank the last one has n + head, and for
    g that it gives the other p - 1 get at most ceil(g / (p - 1)) each.
    """
    table, given = case.table, case.table.lighter_last
    ranks, head = table.pipeline_parallel, head_in_layers(case.model)
    each = case.model.num_layers / ranks

    def slowest(taken: IntColumn) -> NDArray[np.float64]:
        more = -(-taken // np.maximum(ranks - 1, 1))
        return np.asarray(each + np.maximum(more, head - taken))

    has_them = (table.stages_per_rank > 1) & (given < case.model.num_layers // case.num_stages)
    helps = slowest(given) <= (1 - LEAST_GAIN) * slowest(given - 1)
    gives: Mask = (given == 0) | ((ranks > 1) & has_them & helps)
    return gives


def _one_name_each(axes: Axes) -> tuple[Rule, ...]:
    split, kind = _least(axes, "sequence_parallel"), _first(axes, "context_parallel_type")
    zero, kept = axes.named("zero_stage").values[0].tolist()
    schedule = _plain_schedule(axes)
    name = "same_layout_twice"
    return (
        _rule(
            name,
            ("sequence_parallel", "tensor_parallel"),
            lambda case: (case.table.tensor_parallel > 1) | (case.table.sequence_parallel == split),
        ),
        _rule(
            name,
            ("context_parallel", "context_parallel_type"),
            lambda case: (
                (case.table.context_parallel > 1) | (case.table.context_parallel_type == kind)
            ),
        ),
        _rule(
            name,
            ("pipeline_parallel", "schedule"),
            lambda case: (case.table.pipeline_parallel > 1) | (case.table.schedule == schedule),
        ),
        _rule(
            name,
            ("data_parallel", "context_parallel", "zero_stage", "keep_gathered"),
            lambda case: (
                (case.table.data_parallel * case.table.context_parallel > 1)
                | ((case.table.zero_stage == zero) & (case.table.keep_gathered == kept))
            ),
        ),
        _rule(
            name,
            (
                "tensor_parallel",
                "pipeline_parallel",
                "context_parallel",
                "data_parallel",
                "rank_order",
            ),
            _orders_differ,
        ),
        _rule(
            name,
            ("zero_group",),  # a group of one domain that is no choice of its own
            lambda case: case.table.zero_group > 0,
        ),
    )


def _on_free_axes(axes: Axes) -> tuple[Rule, ...]:
    rules = {
        "micro_batch_size": _rule(
            "micro_batch_is_not_huge",
            ("micro_batch_size", "context_parallel"),
            lambda case: (
                (case.table.micro_batch_size == 1)
                | (
                    case.table.micro_batch_size * case.job.seq_len
                    <= MOST_TOKENS_PER_FORWARD * case.table.context_parallel
                )
            ),
        ),
        "context_parallel": _rule(
            "context_slice_is_not_tiny",
            ("context_parallel",),
            lambda case: (
                (case.table.context_parallel == 1)
                | (case.job.seq_len >= LEAST_TOKENS_PER_SLICE * case.table.context_parallel)
            ),
        ),
        "expert_tensor_parallel": _rule(
            "expert_tensor_parallel_follows_tensor_parallel",
            ("expert_tensor_parallel", "tensor_parallel"),
            lambda case: (
                (case.table.expert_tensor_parallel == 1)
                | (case.table.expert_tensor_parallel == case.table.tensor_parallel)
            ),
        ),
        "offload": _rule(
            "processors_offload_nothing",  # their device memory is the host's
            ("offload_optimizer", "offload_parameters", "offload_activations"),
            lambda case: (
                (case.cluster.profile.generation != "cpu")
                | (
                    case.table.offload_optimizer
                    + case.table.offload_parameters
                    + case.table.offload_activations
                    == 0
                )
            ),
        ),
        "lighter_last": _rule(
            "last_stage_gives_what_the_head_weighs",
            ("pipeline_parallel", "stages_per_rank", "lighter_last"),
            _last_stage_gives,
        ),
        "stages_per_rank": _rule(
            "stages_spread_evenly",
            ("pipeline_parallel", "stages_per_rank"),
            _stages_are_alike,
        ),
    }
    return tuple(rule for name, rule in rules.items() if axes.named(name).free)


def _constraint_rules(constraints: Constraints, target: Target) -> tuple[Rule, ...]:
    rules = []
    data = constraints.data_parallel
    if data is not None:
        rules.append(
            _rule(
                "data_parallel_as_asked",
                ("data_parallel",),
                lambda case: np.isin(case.table.data_parallel, data),
            )
        )
    split = constraints.layers_per_stage
    if split is not None:
        rules.append(
            _rule(
                "layers_per_stage_as_asked",
                ("pipeline_parallel", "stages_per_rank"),
                lambda case: case.num_stages == len(split),
            )
        )
    layers = constraints.recompute_layers
    if layers is not None and split is None:
        rules.append(
            _rule(
                "stages_have_recompute_layers",
                ("pipeline_parallel", "stages_per_rank", "lighter_last"),
                lambda case: longest_stages(case.model.num_layers, case.table) >= layers,
            )
        )
    tokens = constraints.min_tokens_per_expert
    if tokens is not None:
        rules.append(
            _rule(
                "tokens_per_expert_as_asked",
                ("micro_batch_size", "context_parallel", "expert_parallel"),
                lambda case: _tokens_per_expert(case) >= tokens,
            )
        )
    if constraints.splits is not None:
        known = [len(split) for split in constraints.splits]
        rules.append(
            _rule(
                "target_splits_layers_itself",
                ("pipeline_parallel", "stages_per_rank"),
                lambda case: np.isin(case.num_stages, known),
            )
        )
    if constraints.runnable:
        rules += expressible_rules(target)
        if constraints.recompute_layers and target in ALL_OR_NONE:
            rules.append(
                _rule(
                    "target_recomputes_all_layers_or_none",
                    ("recompute",),
                    lambda case: case.table.recompute != FULL_CODE,
                )
            )
    return tuple(rules)


def _tokens_per_expert(case: Case) -> IntColumn:
    """Average tokens that one expert sees in one micro-batch, over its expert-parallel group."""
    moe = case.model.moe
    table = case.table
    tokens = table.micro_batch_size * case.job.seq_len // table.context_parallel
    if moe is None:
        return tokens
    return tokens * table.expert_parallel * moe.experts_per_token // moe.num_experts
