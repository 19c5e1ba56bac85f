"""Search: space, bounds, exact values, proof.

The frontier hands out complete layouts in ascending bound; each one's layers are split at best
(`splits.py`) and its exact value joins the incumbents. When the smallest bound left is not below
the K-th incumbent, no layout of the space is faster than these: `optimal`. Where an exact limit
ends the search first the answer is `feasible`, with the bound and the gap.

The K best are distinct: layouts that differ only in recomputation, offload, ZeRO group, rank
order, context type, sequence parallelism or split are one, represented by its fastest. Ties go to
the smaller memory, then to the order of the space.
"""

from dataclasses import dataclass, replace
from math import inf

from costmodels.hardware import Cluster
from costmodels.job import TrainingJob
from costmodels.layout import Layout, split_layers
from costmodels.layout_table import LayoutTable
from costmodels.model import ModelSpec
from planner.constraints import FREE, Constraints
from planner.costs import Costs, ModelCosts
from planner.frontier import Frontier
from planner.judge import SAFE_FRACTION, Judgement, judge
from planner.space import Space, census, space_of
from planner.splits import Limits, StatedSplit, best_split

TOP = 10
MOST_EXACT = 20000  # chosen: exact evaluations before the search gives up on a proof


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What a search found and proved.

    Attributes:
        status: "optimal" (proved), "feasible" (an exact limit came first) or "infeasible".
        plans: Best first, distinct.
        num_layouts: Size of the product space, before any rule.
        num_legal: Layouts that obey the rules and constraints.
        rejected: Layouts by the first rule that rejects them; under `device_memory` those of the
            unfolded ones that a memory bound excluded.
        bound_seconds: No layout of the space is faster than this.
        num_bounded: Layouts, partial ones included, whose bound was computed.
        num_solved: Layouts whose layers were split.
        num_exact: Splits whose exact value was computed.

    """

    status: str
    plans: tuple[Judgement, ...]
    num_layouts: int
    num_legal: int
    rejected: dict[str, int]
    bound_seconds: float
    num_bounded: int
    num_solved: int
    num_exact: int

    @property
    def gap(self) -> float:
        """How much faster than the best plan the bound allows, as a share of it."""
        if not self.plans or self.plans[0].time is None:
            return inf
        best = self.plans[0].time.step_seconds
        return max(0.0, 1 - self.bound_seconds / best)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Incumbent:
    seconds: float
    reserved: float
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The incumbents when the search ended, best first."""

    incumbents: tuple[_Incumbent, ...]
    bound: float
    frontier: Frontier
    num_solved: int
    num_exact: int


def search(
    model: ModelSpec,
    job: TrainingJob,
    cluster: Cluster,
    constraints: Constraints = FREE,
    *,
    top: int = TOP,
    only_fitting: bool = False,
) -> SearchResult:
    """Return the fastest layouts that fit, with what is proved of them.

    Args:
        model: The network.
        job: What is trained per step.
        cluster: The machine.
        constraints: What the user fixed.
        top: How many distinct layouts to prove and return.
        only_fitting: Do not look for layouts at risk where none fits.

    Returns:
        Layouts that fit, ranked by predicted speed; where none fits, those at risk.

    """
    space = space_of(model, job, cluster, constraints)
    costs = ModelCosts(model=model, job=job, cluster=cluster)
    counted = census(space)
    found = explore(space, costs, constraints, share_allowed(constraints), top)
    if not found.incumbents and not only_fitting and constraints.max_memory_fraction is None:
        found = explore(space, costs, constraints, 1.0, top)
    proved = bool(found.incumbents) and found.bound >= found.incumbents[0].seconds
    status = ("optimal" if proved else "feasible") if found.incumbents else "infeasible"
    return SearchResult(
        status=status,
        plans=tuple(judge(model, job, cluster, best.layout) for best in found.incumbents),
        num_layouts=counted.num_layouts,
        num_legal=counted.num_legal,
        rejected=counted.rejected | dict(found.frontier.dropped),
        bound_seconds=min(found.bound, found.incumbents[0].seconds) if found.incumbents else inf,
        num_bounded=found.frontier.num_bounded,
        num_solved=found.num_solved,
        num_exact=found.num_exact,
    )


def share_allowed(constraints: Constraints) -> float:
    """Return the share of a device's usable memory that a plan may reserve."""
    if constraints.max_memory_fraction is not None:
        return constraints.max_memory_fraction
    return 1.0 if constraints.allow_at_risk else SAFE_FRACTION


def explore(space: Space, costs: Costs, constraints: Constraints, share: float, top: int) -> _Found:
    """Run best-first search until the best `top` layouts are proved.

    Args:
        space: What to search.
        costs: The models.
        constraints: What the user stated of splits.
        share: Share of the usable memory that may be reserved.
        top: Distinct layouts wanted.

    """
    limits = Limits(device=share * costs.capacity, host=costs.host_capacity)
    stated = StatedSplit(
        layers_per_stage=constraints.layers_per_stage, recompute_layers=constraints.recompute_layers
    )
    frontier = Frontier(space=space, costs=costs, limit=limits.device)
    frontier.start()
    best: dict[tuple[object, ...], _Incumbent] = {}
    cutoff, open_bound, num_solved, num_exact = inf, inf, 0, 0
    while num_exact < MOST_EXACT and (popped := frontier.pop(cutoff)) is not None:
        bound, row = popped
        layout = _template(row, space.model.num_layers)
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
            best[key] = _Incumbent(
                seconds=outcome.seconds, reserved=reserved, layout=outcome.layout
            )
            cutoff = _cutoff(best, top)
    ranked = sorted(best.values(), key=lambda found: (found.seconds, found.reserved))
    return _Found(
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


def _cutoff(best: dict[tuple[object, ...], _Incumbent], top: int) -> float:
    """Return the seconds from which on a layout does not make the list."""
    if len(best) < top:
        return inf
    return sorted(found.seconds for found in best.values())[top - 1]


def _template(row: LayoutTable, num_layers: int) -> Layout:
    """Return a row as a layout with its even split; sequence parallelism is off at tp 1."""
    stages = int(row.pipeline_parallel[0] * row.stages_per_rank[0])
    layout = row.layout(0, split_layers(num_layers, stages), 0)
    splits = layout.sequence_parallel and layout.tensor_parallel > 1
    return replace(layout, sequence_parallel=splits)
