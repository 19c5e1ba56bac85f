"""Best-first exploration: exact values in order of the bound, until the K best are proved.

The frontier hands out complete layouts in ascending bound; each one's layers are split at best
(`splits.py`) and its exact value joins the incumbents. When the smallest bound left is not below
the K-th incumbent, no layout of the space is faster than these.
"""

from dataclasses import dataclass, field
from math import inf

from costmodels.layout import Layout
from planner.constraints import Constraints
from planner.search.costs import Costs
from planner.search.frontier import Frontier
from planner.search.priced import PricedLayout
from planner.search.references import References
from planner.search.row_bounds import RowBounds
from planner.search.space import Space
from planner.search.splits import FIRST_ANSWERS, MOST_ANSWERS, Limits, StatedSplit, best_split

MOST_SOLVED = 3000  # chosen: layouts judged before the search gives up on a proof, about 25 CPU s
MOST_SETTLING = 2048  # chosen: answers times stages that settle waiting layouts, about 10 CPU s


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
        states_fit: Whether devices and hosts together hold each weight's states once; where they do
            not, nothing was explored.
        num_solved: Layouts whose layers were split.
        num_exact: Splits whose exact value was computed.

    """

    incumbents: tuple[Incumbent, ...]
    bound: float
    frontier: Frontier
    states_fit: bool
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
        layers_per_stage=constraints.layers_per_stage,
        splits=constraints.splits or (),
        recompute_layers=constraints.recompute_layers,
    )
    bounds = RowBounds(
        space=space,
        costs=costs,
        limit=limits.device,
        references=References(costs=costs),
        known_splits=constraints.layers_per_stage is None,
    )
    frontier = Frontier(space=space, bounds=bounds)
    states_fit = costs.may_hold_states(share)
    if states_fit:
        frontier.start()
    references = bounds.references if bounds.known_splits else None
    ranking = _Ranking(limits=limits, stated=stated, references=references, top=top)
    while ranking.num_solved < MOST_SOLVED or not ranking.best:  # that nothing fits needs a proof
        popped = frontier.pop(ranking.cutoff)
        if popped is None or (stop_at_first and ranking.best):
            break
        ranking.judge(*popped, FIRST_ANSWERS)
    if not stop_at_first:
        ranking.finish()
    ranked = sorted(ranking.best.values(), key=lambda found: (found.seconds, found.reserved))
    return Found(
        incumbents=tuple(ranked[:top]),
        bound=min(ranking.least_open(), frontier.least_bound()),
        frontier=frontier,
        states_fit=states_fit,
        num_solved=ranking.num_solved,
        num_exact=ranking.num_exact,
    )


@dataclass(slots=True, kw_only=True)
class _Ranking:
    """The best distinct layouts so far, and those whose splits are not settled.

    Attributes:
        best: The fastest layout of each identity.
        cutoff: Seconds from which on a layout does not make the list.
        waiting: Layouts with the bound of their splits not yet judged.

    """

    limits: Limits
    stated: StatedSplit
    references: References | None
    top: int
    best: dict[tuple[object, ...], Incumbent] = field(default_factory=dict)
    cutoff: float = inf
    waiting: list[tuple[float, PricedLayout]] = field(default_factory=list)
    num_solved: int = 0
    num_named: int = 0
    num_exact: int = 0

    def judge(self, bound: float, priced: PricedLayout, answers: int) -> None:
        """Find a layout's best split, unless its bound says that it is not worth it."""
        key = identity(priced.layout)
        worth = min(self.cutoff, self.best[key].seconds) if key in self.best else self.cutoff
        if bound >= worth:
            return
        outcome = best_split(
            priced,
            self.limits,
            worth,
            self.stated,
            answers=answers,
            references=self.references if priced.layout.stages_per_rank > 1 else None,
        )
        self.num_solved += 1
        self.num_named += outcome.num_named
        self.num_exact += outcome.num_exact
        open_bound = max(bound, outcome.bound)  # the row's own bound holds for every split too
        if open_bound < min(worth, outcome.seconds):
            self.waiting.append((open_bound, priced))
        if outcome.layout is not None and outcome.seconds < worth:
            self.best[key] = Incumbent(
                seconds=outcome.seconds, reserved=outcome.reserved, layout=outcome.layout
            )
            self.cutoff = self._cutoff()

    def finish(self) -> None:
        """Settle waiting layouts, best bound first; the cutoff is as good as it gets by now.

        What is left when the work allowed is done stays open.
        """
        waiting, self.waiting = sorted(self.waiting, key=lambda pair: pair[0]), []
        left = MOST_SETTLING
        for bound, priced in waiting:
            stages = priced.layout.num_stages
            answers = min(MOST_ANSWERS, left // stages)
            if answers < 1:
                self.waiting.append((bound, priced))
                continue
            before = self.num_solved + self.num_named
            self.judge(bound, priced, answers)
            left -= (self.num_solved + self.num_named - before) * stages

    def least_open(self) -> float:
        """Return the smallest bound of what was never settled; inf when all was."""
        return min((bound for bound, _ in self.waiting), default=inf)

    def _cutoff(self) -> float:
        if len(self.best) < self.top:
            return inf
        return sorted(found.seconds for found in self.best.values())[self.top - 1]


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
