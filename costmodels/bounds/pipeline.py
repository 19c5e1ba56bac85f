"""Lower bounds of a layout's pipeline over every split of its layers that a caller considers.

`makespan_lower_bound` knows sums over all stages; this module finds the sums from block costs, and
adds what a caller may know of the splits (`SplitLimits`): the smallest stage, and how many layers
each stage must recompute to fit. With several stages per rank the last rank gives a bound of its
own: nothing starts there before one forward of every rank ahead, and behind its last backward the
ranks ahead run one more each (unless weight gradients may end the step).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodels.layout import Schedule
from costmodels.layout_table import SCHEDULES, LayoutTable
from costmodels.model import LayerKind
from costmodels.schedule import PipelineSums, makespan_lower_bound
from costmodels.time.layouts import FULL_CODE, BlockTimes, LayoutCosts

Values = NDArray[np.float64]

_FEW_SPARE = 6  # places to spare that are tried one by one

_INTERLEAVED = SCHEDULES.index(Schedule.INTERLEAVED)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLimits:
    """What the caller knows of every split that it will consider; one entry per layout.

    Attributes:
        layers: Layers of each stage, at least.
        recomputed: Layers that each stage recomputes under full recomputation, at least.
        fullest: Layers of the model's main kind that some rank holds, at least.
        ahead: Such layers on the first stage of every rank but the last, together.
        last: Such layers on the last rank; with `ahead`, 0 where the split is not known.
        redone: Such layers that the fullest rank recomputes, at least.

    """

    layers: Values
    recomputed: Values
    fullest: Values
    ahead: Values
    last: Values
    redone: Values


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTotals:
    """Sums over all blocks of the network, in seconds of one micro-batch."""

    forward: Values
    backward_input: Values
    backward_weight: Values
    recompute: Values


def blocks_of(
    costs: LayoutCosts, counts: dict[LayerKind, int]
) -> tuple[tuple[int, BlockTimes], ...]:
    """Return every block of the network with its number."""
    layers = tuple((counts[kind], times) for kind, times in costs.layers)
    return ((1, costs.embedding), *layers, (1, costs.head))


def block_totals(costs: LayoutCosts, counts: dict[LayerKind, int]) -> BlockTotals:
    """Return what all blocks of the network take together."""
    blocks = blocks_of(costs, counts)
    recompute = sum(counts[kind] * times.recompute for kind, times in costs.layers)
    return BlockTotals(
        forward=np.asarray(sum(n * times.forward for n, times in blocks)),
        backward_input=np.asarray(sum(n * times.backward_input for n, times in blocks)),
        backward_weight=np.asarray(sum(n * times.backward_weight for n, times in blocks)),
        recompute=np.asarray(recompute),
    )


def no_limits(table: LayoutTable) -> SplitLimits:
    """Each stage has a layer, and under full recomputation recomputes one."""
    one = np.ones(len(table))
    return SplitLimits(
        layers=one,
        recomputed=one,
        fullest=one,
        ahead=0 * one,
        last=0 * one,
        redone=one,
    )


def pipeline_sums(
    costs: LayoutCosts,
    counts: dict[LayerKind, int],
    totals: BlockTotals,
    table: LayoutTable,
    limits: SplitLimits,
) -> PipelineSums:
    """Return what every partition has in common."""
    layers = [times for _, times in costs.layers]
    p, v = table.pipeline_parallel.astype(np.float64), table.stages_per_rank.astype(np.float64)
    num_layers = np.full(len(table), float(sum(counts.values())))
    again, main = _again(costs, table), main_kind(costs, counts, table)
    shares = [times.forward / times.total for times in (costs.embedding, *layers, costs.head)]
    least = np.minimum.reduce([times.total for times in layers])
    fullest = np.ceil(num_layers / p)
    few = limits.layers

    def redone(of_layers: Values, stages: Values) -> Values:
        """Fewest layers that so many layers in so many stages recompute: all but one are small."""
        longest = np.maximum(of_layers - (stages - 1) * few, few)
        some = (stages - 1) * np.minimum(limits.recomputed, few)
        return np.asarray(some + np.minimum(limits.recomputed, longest), dtype=np.float64)

    backward = [times.backward_input + times.backward_weight for times in layers]
    ends = v * few
    return PipelineSums(
        forward=totals.forward,
        backward_input=totals.backward_input + again * redone(num_layers, p * v),
        backward_weight=totals.backward_weight,
        # Some rank holds at least the mean number of layers, rounded up; the last stage the head.
        slowest_rank=np.maximum.reduce(
            [
                fullest * least + again * redone(fullest, v),
                limits.fullest * main.total
                + main.redone(np.maximum(limits.redone, np.minimum(limits.recomputed, few))),
                _levelled_work(costs, counts, table, limits.recomputed),
                costs.head.total + ends * least + again * v * np.minimum(limits.recomputed, few),
            ]
        ),
        forward_share=np.maximum.reduce(shares),
        smallest_forward=few * np.minimum.reduce([times.forward for times in layers]),
        smallest_backward=few * np.minimum.reduce(backward)
        + again * np.minimum(limits.recomputed, few),
        way=costs.hops.way,
        way_ahead=costs.hops.way_ahead,
        way_round=costs.hops.way_round,
    )


def pipeline_lower_bound(
    costs: LayoutCosts,
    counts: dict[LayerKind, int],
    sums: PipelineSums,
    table: LayoutTable,
    limits: SplitLimits,
) -> Values:
    """Return the schedule's bound, or with several stages per rank that of the last rank."""
    p, v = table.pipeline_parallel, table.stages_per_rank.astype(np.float64)
    general = makespan_lower_bound(
        table.schedule, p, table.stages_per_rank, table.num_micro_batches, sums
    )
    main, again = main_kind(costs, counts, table), _again(costs, table)
    redone = again * np.minimum(limits.recomputed, limits.layers)
    work = limits.last * main.total + main.redone(v * np.minimum(limits.recomputed, limits.layers))
    work = work + np.where(table.is_v_shaped, 0.0, costs.head.total)
    before = limits.ahead * main.forward + sums.way
    backward = limits.ahead * (main.backward_input + main.backward_weight) + (p - 1) * redone
    after = np.where(table.schedule == _INTERLEAVED, backward + sums.way, 0.0)
    last = before + table.num_micro_batches * work + after
    bound: Values = np.where(v > 1, np.maximum(general, last), general)
    return bound


def _again(costs: LayoutCosts, table: LayoutTable) -> Values:
    """Return what recomputing one layer adds, the cheapest kind; 0 where nothing is redone."""
    cheapest = np.minimum.reduce([times.recompute for _, times in costs.layers])
    again: Values = np.where(table.recompute == FULL_CODE, cheapest, 0.0)
    return again


@dataclass(frozen=True, slots=True, kw_only=True)
class MainKind:
    """Layers with experts, or without, whichever most are; seconds are of the cheapest window.

    Attributes:
        num_layers: How many there are.
        alike: One of each window.
        again: What recomputing it adds; 0 where nothing is recomputed.
        other: Work of the cheapest layer of the other kind; inf where there is none.
        other_again: What recomputing that one adds.

    """

    num_layers: int
    alike: tuple[BlockTimes, ...]
    forward: Values
    backward_input: Values
    backward_weight: Values
    total: Values
    again: Values
    other: Values
    other_again: Values

    def redone(self, layers: Values) -> Values:
        """Return what recomputing so many layers of one rank adds, at least.

        A stage recomputes its first layers. Where some of these are of the other kind, the rank
        does that layer's work besides.
        """
        mixed = self.other + layers * np.minimum(self.again, self.other_again)
        least: Values = np.minimum(layers * self.again, mixed)
        return least


def most_have_experts(counts: Mapping[LayerKind, int]) -> bool:
    """Return whether layers of the main kind have experts."""
    return sum(n if kind.has_experts else -n for kind, n in counts.items()) > 0


def main_kind(costs: LayoutCosts, counts: dict[LayerKind, int], table: LayoutTable) -> MainKind:
    """Return the layer with experts, or without, whichever most layers are."""
    main = most_have_experts(counts)
    alike = [times for kind, times in costs.layers if kind.has_experts == main]
    others = [times for kind, times in costs.layers if kind.has_experts != main]
    full = table.recompute == FULL_CODE
    never = np.full(len(table), np.inf)

    def least(of_kind: list[BlockTimes], name: str) -> Values:
        values: Values = np.minimum.reduce([getattr(times, name) for times in of_kind])
        return values

    return MainKind(
        num_layers=sum(n for kind, n in counts.items() if kind.has_experts == main),
        alike=tuple(alike),
        forward=least(alike, "forward"),
        backward_input=least(alike, "backward_input"),
        backward_weight=least(alike, "backward_weight"),
        total=least(alike, "total"),
        again=np.where(full, least(alike, "recompute"), 0.0),
        other=least(others, "total") if others else never,
        other_again=np.where(full, least(others, "recompute") if others else 0.0, 0.0),
    )


def _levelled_work(
    costs: LayoutCosts,
    counts: dict[LayerKind, int],
    table: LayoutTable,
    recomputed: Values,
) -> Values:
    """Return the least seconds of the slowest rank when whole layers lie beside embedding and head.

    Some rank holds n = ceil(layers / ranks) of them. If none holds more, there are d = n * ranks -
    layers places to spare: i of them beside the head leave d - i beside the embedding. Known for
    one stage per rank; with several (a V has both ends on one rank), or an open schedule, nothing
    is said (0).
    """
    one_stage = (table.stages_per_rank == 1) & (table.pipeline_parallel > 1) & (table.schedule >= 0)
    if not one_stage.any():
        return np.zeros(len(table))
    main = main_kind(costs, counts, table)
    p = table.pipeline_parallel.astype(np.float64)
    most = np.ceil(main.num_layers / p)
    spare = most * p - main.num_layers

    def seconds(held: Values) -> Values:
        held = np.maximum(held, 0.0)
        work: Values = held * main.total + main.redone(np.minimum(recomputed, held))
        return work

    def beside(of_head: Values, of_embedding: Values) -> Values:
        head = seconds(most - of_head) + costs.head.total
        embedding = seconds(most - of_embedding) + costs.embedding.total
        slowest: Values = np.maximum.reduce([seconds(most), head, embedding])
        return slowest

    least = seconds(most + 1)
    for i in range(_FEW_SPARE + 1):
        given = np.minimum(float(i), spare)
        least = np.minimum(least, beside(given, spare - given))
    # With more places to spare than were tried, both ends may take all of them.
    least = np.where(spare > _FEW_SPARE, np.minimum(least, beside(spare, spare)), least)
    known: Values = np.where(one_stage, least, 0.0)
    return known
