"""Best-first exploration: exact values in order of the bound, until the K best are proved.

The frontier hands out complete layouts in ascending bound; each one's layers are split at best
(`splits.py`) and its exact value joins the incumbents. When the smallest bound left is not below
the K-th incumbent, no layout of the space is faster than these.
"""

from dataclasses import dataclass, replace
from math import inf

from costmodels.layout import Layout, split_layers
from costmodels.layout_table import LayoutTable
from planner.constraints import Constraints
from planner.costs import Costs
from planner.frontier import Frontier
from planner.row_bounds import RowBounds
from planner.space import Space
from planner.splits import Limits, StatedSplit, best_split

MOST_EXACT = 20000  # chosen: exact evaluations before the search gives up on a proof


@dataclass(frozen=True, slots=True, kw_only=True)
class Incumbent:
    """A layout with its exact seconds and bytes."""

    seconds: float
    reserved: float
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Where an exploration ended.

    Attributes:
        incumbents: Best first, distinct.
        bound: No layout of the space is faster than this or the best incumbent.
        num_solved: Layouts whose layers were split.
        num_exact: Splits whose exact value was computed.

    """

    incumbents: tuple[Incumbent, ...]
    bound: float
    frontier: Frontier
    num_solved: int
    num_exact: int


def explore(
    space: Space,
    costs: Costs,
    constraints: Constraints,
    share: float,
    top: int,
    *,
    stop_at_first: bool = False,
) -> Found:
    """Run best-first search until the best `top` layouts are proved.

    Args:
        space: What to search.
        costs: The models.
        constraints: What the user stated of splits.
        share: Share of the usable memory that may be reserved.
        top: Distinct layouts wanted.
        stop_at_first: End with the first layout that fits; nothing is proved then.

    """
    limits = Limits(device=share * costs.capacity, host=costs.host_capacity)
    stated = StatedSplit(
        layers_per_stage=constraints.layers_per_stage, recompute_layers=constraints.recompute_layers
    )
    bounds = RowBounds(
        space=space,
        costs=costs,
        limit=limits.device,
        even_chunks=constraints.layers_per_stage is None,
    )
    frontier = Frontier(space=space, bounds=bounds)
    frontier.start()
    best: dict[tuple[object, ...], Incumbent] = {}
    cutoff, open_bound, num_solved, num_exact = inf, inf, 0, 0
    while num_exact < MOST_EXACT and (popped := frontier.pop(cutoff)) is not None:
        bound, row = popped
        layout = even_layout(row, space.model.num_layers)
        key = identity(layout)
        worth = min(cutoff, best[key].seconds) if key in best else cutoff
        if bound >= worth:
            continue
        outcome = best_split(costs, layout, limits, worth, stated)
        num_solved, num_exact = num_solved + 1, num_exact + outcome.num_exact
        if outcome.bound < min(worth, outcome.seconds):
            open_bound = min(open_bound, outcome.bound)  # the solver's answers ran out
        if outcome.layout is not None and outcome.seconds < worth:
            reserved = costs.memory(outcome.layout).parts.reserved
            best[key] = Incumbent(seconds=outcome.seconds, reserved=reserved, layout=outcome.layout)
            cutoff = _cutoff(best, top)
            if stop_at_first:
                break
    ranked = sorted(best.values(), key=lambda found: (found.seconds, found.reserved))
    return Found(
        incumbents=tuple(ranked[:top]),
        bound=min(open_bound, frontier.least_bound()),
        frontier=frontier,
        num_solved=num_solved,
        num_exact=num_exact,
    )


def identity(layout: Layout) -> tuple[object, ...]:
    """Return what makes a layout another one than its neighbours in a ranking."""
    return (
        layout.tensor_parallel,
        layout.pipeline_parallel,
        layout.context_parallel,
        layout.expert_parallel,
        layout.expert_tensor_parallel,
        layout.micro_batch_size,
        layout.zero_stage,
        layout.schedule,
        layout.stages_per_rank,
    )


def _cutoff(best: dict[tuple[object, ...], Incumbent], top: int) -> float:
    """Return the seconds from which on a layout does not make the list."""
    if len(best) < top:
        return inf
    return sorted(found.seconds for found in best.values())[top - 1]


def even_layout(row: LayoutTable, num_layers: int) -> Layout:
    """Return a row as a layout with its even split; sequence parallelism is off at tp 1."""
    stages = int(row.pipeline_parallel[0] * row.stages_per_rank[0])
    layout = row.layout(0, split_layers(num_layers, stages), 0)
    splits = layout.sequence_parallel and layout.tensor_parallel > 1
    return replace(layout, sequence_parallel=splits)
