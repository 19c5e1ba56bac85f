"""The best split of one layout's layers: which layers on which stage, how many recomputed.

    no pipeline              one stage
    one stage per rank       any split by ascending lower bound (`split_paths`); each is judged by
                             the exact models, until the bound reaches the best one or the cutoff
    several stages per rank  the one that the layout comes with, an axis of the space

Under full recomputation each stage recomputes the fewest layers that fit: memory falls with their
number and time never does (`stages.rank_rest` says how the estimate keeps that).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, inf

from costmodels.layout import Layout, Recompute
from costmodels.memory.estimate import MemoryDemand
from planner.search.priced import PricedLayout
from planner.search.references import References
from planner.search.split_paths import ascending_splits
from planner.search.stage_problem import SPLIT_SCHEDULES, ScoredProblem

FIRST_ANSWERS = 2  # chosen: answers of the solver judged before a layout waits for a better cutoff
MOST_ANSWERS = 64  # chosen: answers judged before a layout counts as open


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a layout must stay within.

    Attributes:
        device: Bytes that a rank may reserve.
        host: Bytes of host memory of a node.

    """

    device: float
    host: float

    def hold(self, memory: MemoryDemand) -> bool:
        """Whether a layout's memory stays within both."""
        return memory.reserved <= self.device and memory.host_per_node <= self.host


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedSplit:
    """What a user or a target fixed of the split; None leaves it open.

    Attributes:
        layers_per_stage: The split.
        splits: One split per number of stages, where the target makes its own.
        recompute_layers: Layers that each stage recomputes, 0 for all.

    """

    layers_per_stage: tuple[int, ...] | None = None
    splits: tuple[tuple[int, ...], ...] = ()
    recompute_layers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one layout.

    Attributes:
        layout: The best split that fits; None without.
        seconds: Its exact value; inf without.
        reserved: Bytes of its fullest rank.
        bound: No other split is faster than this.
        num_named: Splits that were looked at.
        num_exact: Those of them whose exact value was computed.

    """

    layout: Layout | None
    seconds: float
    reserved: float
    bound: float
    num_named: int
    num_exact: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fitting:
    """A split that fits, with the bytes of its fullest rank."""

    layout: Layout
    reserved: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A split that fits, with its exact seconds and bytes."""

    layout: Layout
    seconds: float
    reserved: float


def best_split(
    priced: PricedLayout,
    limits: Limits,
    cutoff: float,
    stated: StatedSplit,
    *,
    answers: int = MOST_ANSWERS,
    references: References | None = None,
) -> Outcome:
    """Return the fastest split of a layout that fits.

    Args:
        priced: Everything but the recomputed layers and, with one stage per rank, the split; and
            its models.
        limits: Memory.
        cutoff: Splits of this many seconds or more are of no interest.
        stated: What the user fixed of the split.
        answers: Splits of the solver that are judged at most.
        references: Simulated pipelines that may settle a known split.

    """
    layout = priced.layout
    own = {len(split): split for split in stated.splits}
    split = stated.layers_per_stage or own.get(layout.num_stages)
    if split is None and layout.num_stages > 1 and layout.stages_per_rank == 1:
        assert layout.schedule in SPLIT_SCHEDULES, layout.schedule
        return _solved(priced, limits, cutoff, stated, answers=answers)
    split = split or layout.layers_per_stage
    one = _lightest(priced, replace(layout, layers_per_stage=split), limits, stated)
    if one is None:
        return _outcome([], inf, 1)
    if references is not None:
        if references.settle(priced, one.layout, cutoff):
            return _outcome([], inf, 1)
        references.add(priced, one.layout)
    best = _judged(priced, one)
    return _outcome([best], best.seconds, 1)


def _outcome(found: list[Judged], bound: float, num_named: int) -> Outcome:
    best = min(found, key=lambda one: one.seconds, default=None)
    return Outcome(
        layout=best.layout if best else None,
        seconds=best.seconds if best else inf,
        reserved=best.reserved if best else inf,
        bound=min(bound, best.seconds) if best else bound,
        num_named=num_named,
        num_exact=len(found),
    )


def _judged(priced: PricedLayout, one: _Fitting) -> Judged:
    return Judged(layout=one.layout, seconds=priced.seconds(one.layout), reserved=one.reserved)


def _lightest(
    priced: PricedLayout, layout: Layout, limits: Limits, stated: StatedSplit, least: int = 0
) -> _Fitting | None:
    """Return one split with the fewest recomputed layers that fit, None where none do.

    Fewer than `least` of this split do not fit, nor fewer of any than the layout's own bound says.
    """
    longest, layers = max(layout.layers_per_stage), 0

    @cache
    def demand(layers: int) -> MemoryDemand:
        return priced.memory(replace(layout, recompute_layers=layers))

    def reserved(layers: int) -> float:
        return demand(layers % longest).reserved  # all are written as 0

    if layout.recompute is Recompute.FULL and stated.recompute_layers is None:
        least = max(least, priced.least_recomputed, 1)
        fewest = _fewest(reserved, limits.device, least, longest)
        if fewest is None:
            return None
        layers = fewest % longest
    elif layout.recompute is Recompute.FULL:
        layers = stated.recompute_layers or 0
    if layers > longest:  # stated for a longer stage: the rules refuse it
        return None
    if not limits.hold(demand(layers)):
        return None
    candidate = replace(layout, recompute_layers=layers)
    return _Fitting(layout=candidate, reserved=demand(layers).reserved)


def _fewest(reserved: Callable[[int], float], limit: float, least: int, most: int) -> int | None:
    """Return the smallest number from least to most whose memory fits, None where none does.

    Memory falls almost linearly with the number, so a secant finds it in a step or two.
    """
    least = min(least, most)
    above = reserved(most)  # first: most layouts that do not fit are known by it
    if above > limit:
        return None
    below = reserved(least)
    if below <= limit:
        return least
    low, high = least, most  # low does not fit, high does
    while high - low > 1:
        share = (below - limit) / max(below - above, 1.0)
        guess = min(max(low + ceil(share * (high - low)), low + 1), high - 1)
        held = reserved(guess)
        if held > limit:
            low, below = guess, held
        else:
            high, above = guess, held
            if high - low > 1 and reserved(high - 1) > limit:
                break
    return high


def _solved(
    priced: PricedLayout,
    limits: Limits,
    cutoff: float,
    stated: StatedSplit,
    *,
    answers: int,
) -> Outcome:
    """Judge splits by ascending bound until the best exact value is proved."""
    layout = priced.layout
    scored = priced.stage_problem(limits.device)
    problem = scored.problem
    if stated.recompute_layers is not None and problem.most_recomputed:
        layers = stated.recompute_layers or problem.most_recomputed
        problem = replace(problem, least_recomputed=layers, most_recomputed=layers)
    found: list[Judged] = []

    def worth() -> float:
        return min(cutoff, min((one.seconds for one in found), default=inf))

    def judge(split: tuple[int, ...]) -> None:
        given = replace(layout, layers_per_stage=split)
        # Of equal scores the solver may name more than the fewest.
        one = _lightest(priced, given, limits, stated, problem.least_recomputed)
        if one is not None and _floor(scored, one.layout) < worth():
            found.append(_judged(priced, one))

    tried: tuple[int, ...] = ()
    num_named = 0
    if len(set(problem.kind_of_layer)) > 1:
        # Of mixed layers the solver knows memory less well: the even split is a good start.
        tried, num_named = problem.hint, 1
        judge(tried)
    bound, highest = inf, scored.score(worth())
    named = ascending_splits(replace(problem, cutoff=highest))
    for _ in range(answers):
        answer = next(named, None)
        if answer is None:
            bound = inf if highest is None else scored.seconds(highest + 1)
            break
        bound = scored.seconds(answer.bound)
        if bound >= worth():
            break
        if answer.layers_per_stage != tried:
            num_named += 1
            judge(answer.layers_per_stage)
    return _outcome(found, bound, num_named)


def _floor(scored: ScoredProblem, layout: Layout) -> float:
    """Return seconds that a split with its recomputed layers does not go below."""
    redone = 0
    if layout.recompute is Recompute.FULL:
        redone = layout.recompute_layers or max(layout.layers_per_stage)
    return scored.seconds(scored.problem.score_of(layout.layers_per_stage, redone))
