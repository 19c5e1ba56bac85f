"""Search: space, bounds, exact values, proof.

`explore` finds the K best in order of their bounds. When the smallest bound left is not below them,
no layout of the space is faster: `optimal`. Where a limit of its work ends the search first the
answer is `feasible`, with the bound and the gap. Where nothing fits, the nearest miss says what
lacks.

The K best are distinct: layouts that differ only in recomputation, offload, ZeRO group, whether
ZeRO-3 keeps what it gathers, rank order, context type, sequence parallelism or split are one,
represented by its fastest. Ties go to the smaller memory, then to the order of the space.
"""

from dataclasses import dataclass
from math import inf

from costmodels.hardware import Cluster
from costmodels.job import TrainingJob
from costmodels.model import ModelSpec
from planner.constraints import FREE, Constraints
from planner.judge import SAFE_FRACTION, Judgement, judge
from planner.search.costs import ModelCosts
from planner.search.explore import explore
from planner.search.nearest import NearestMiss, nearest_miss
from planner.search.space import census, space_of

TOP = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What a search found and proved.

    Attributes:
        status: "optimal" (proved), "feasible" (a limit of its work came first) or "infeasible".
        plans: Best first, distinct.
        num_layouts: Size of the product space, before any rule.
        num_legal: Layouts that obey the rules and constraints.
        rejected: Layouts by the first rule that rejects them; under `device_memory` those of the
            unfolded ones that a memory bound excluded.
        bound_seconds: No layout of the space is faster than this.
        num_bounded: Layouts, partial ones included, whose bound was computed.
        num_solved: Layouts whose layers were split.
        num_exact: Splits whose exact value was computed.
        nearest_miss: What comes closest, where nothing fits.

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
    nearest_miss: NearestMiss | None = None

    @property
    def gap(self) -> float:
        """How much faster than the best plan the bound allows, as a share of it."""
        if not self.plans or self.plans[0].time is None:
            return inf
        best = self.plans[0].time.step_seconds
        return max(0.0, 1 - self.bound_seconds / best)


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
        only_fitting: Do not look for layouts at risk, nor for the nearest miss, where none fits.

    Returns:
        Layouts that fit, ranked by predicted speed; where none fits, those at risk.

    """
    _refuse_impossible_splits(model, constraints)
    space = space_of(model, job, cluster, constraints)
    costs = ModelCosts.under(model, job, cluster, constraints)
    counted = census(space)
    found = explore(space, costs, constraints, share_allowed(constraints), top)
    if not found.incumbents and not only_fitting and constraints.max_memory_fraction is None:
        found = explore(space, costs, constraints, 1.0, top)
    dropped = dict(found.frontier.bounds.dropped)
    if not found.states_fit:
        dropped = {"device_memory": counted.num_legal}
    proved = bool(found.incumbents) and found.bound >= found.incumbents[0].seconds
    status = ("optimal" if proved else "feasible") if found.incumbents else "infeasible"
    miss = None
    if not found.incumbents and not only_fitting:
        miss = nearest_miss(
            model,
            job,
            cluster,
            constraints,
            share=constraints.max_memory_fraction or 1.0,
            safe_share=share_allowed(constraints),
        )
    return SearchResult(
        status=status,
        plans=tuple(judge(model, job, cluster, best.layout) for best in found.incumbents),
        num_layouts=counted.num_layouts,
        num_legal=counted.num_legal,
        rejected=counted.rejected | dropped,
        bound_seconds=min(found.bound, found.incumbents[0].seconds) if found.incumbents else inf,
        num_bounded=found.frontier.num_bounded,
        num_solved=found.num_solved,
        num_exact=found.num_exact,
        nearest_miss=miss,
    )


def _refuse_impossible_splits(model: ModelSpec, constraints: Constraints) -> None:
    """Raise ValueError where what is stated of the layers suits no layout of this model."""
    split, layers = constraints.layers_per_stage, constraints.recompute_layers
    if split is not None and sum(split) != model.num_layers:
        raise ValueError(
            f"--layers-per-stage {','.join(map(str, split))} sums to {sum(split)} layers, but "
            f"{model.name} has {model.num_layers}; no layer is dropped silently"
        )
    if layers is not None and layers > model.num_layers:
        raise ValueError(
            f"--recompute-layers {layers} is more than the {model.num_layers} layers of "
            f"{model.name}"
        )


def share_allowed(constraints: Constraints) -> float:
    """Return the share of a device's usable memory that a plan may reserve."""
    if constraints.max_memory_fraction is not None:
        return constraints.max_memory_fraction
    return 1.0 if constraints.allow_at_risk else SAFE_FRACTION
