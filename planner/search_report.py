"""What `planner search` prints: one ranking, or the best plan at every count of GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass

from costmodels.layout import Layout
from costmodels.model import ModelSpec
from costmodels.schedule import build_schedule
from costmodels.units import GIB
from planner.codec import Json, encode
from planner.constraints import FREE, Constraints
from planner.contract import SCHEMA, judgement_json, layout_json
from planner.explain.advice import advice
from planner.explain.margins import margins
from planner.explain.no_layout import plainest_and_its_violations
from planner.explain.reasons import limits, why_first
from planner.judge import Judgement
from planner.plan import Plan, SolverStatus
from planner.report import VERDICT_WORDS, heading, layout_words, ranking_table
from planner.rules import Violation
from planner.search.nearest import NearestMiss
from planner.search.pareto import FrontPoint, non_dominated
from planner.search.ranking import SearchResult
from planner.search.sizing import Sized

REASONS = 4  # rejected rules that are worth a line


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Everything that a search found.

    Attributes:
        found: One entry; one per count of GPUs for a sweep.
        smallest_gpus: Fewest GPUs that fit, where that was asked.
        constraints: What the user fixed.
        memory_front: The fastest plans below ever less memory, where that was asked.
        sizes: The fastest plans at some counts of GPUs, ascending, where that was asked.

    """

    model: ModelSpec
    found: tuple[Sized, ...]
    smallest_gpus: int | None = None
    constraints: Constraints = FREE
    memory_front: tuple[FrontPoint, ...] = ()
    sizes: tuple[Sized, ...] = ()

    @property
    def plans(self) -> tuple[tuple[Sized, Judgement], ...]:
        """Plans with their job and cluster, fastest first."""
        pairs = [(one, plan) for one in self.found for plan in one.result.plans]
        return tuple(sorted(pairs, key=_seconds_per_token))


def _seconds_per_token(pair: tuple[Sized, Judgement]) -> float:
    _, plan = pair
    assert plan.time is not None
    return plan.time.step_seconds / plan.time.tokens


def best_plan(answer: Answer) -> Plan:
    """Return the fastest plan as what is written to a file."""
    found, best = answer.plans[0]
    layout, result = best.layout, found.result
    actions: tuple[str, ...] = ()
    if layout.pipeline_parallel > 1:
        table = build_schedule(
            layout.schedule,
            layout.pipeline_parallel,
            layout.stages_per_rank,
            layout.num_micro_batches,
        )
        actions = tuple(" ".join(row) for row in table.strings())
    return Plan(
        model=answer.model,
        job=found.job,
        cluster=found.cluster,
        layout=layout,
        estimate=judgement_json(best, answer.model, found.job, found.cluster),
        solver=SolverStatus(
            status=result.status,
            num_layouts=result.num_layouts,
            num_solved=result.num_solved,
            bound_seconds=result.bound_seconds,
        ),
        actions=actions,
    )


def answer_json(answer: Answer, seconds: float) -> dict[str, object]:
    """Return the contract's search object."""
    last = answer.found[-1].result
    plans = [
        {**judgement_json(plan, answer.model, found.job, found.cluster), "rank": rank}
        for rank, (found, plan) in enumerate(answer.plans, start=1)
    ]
    rejected: dict[str, int] = {}
    for found in answer.found:
        for rule, count in found.result.rejected.items():
            rejected[rule] = rejected.get(rule, 0) + count
    return {
        "schema": SCHEMA,
        "status": _status(answer),
        "plans": plans,
        "num_layouts": sum(found.result.num_layouts for found in answer.found),
        "num_legal": sum(found.result.num_legal for found in answer.found),
        "num_solved": sum(found.result.num_solved for found in answer.found),
        "rejected": rejected,
        "nearest_miss": None if answer.plans else _miss_json(answer, last.nearest_miss),
        "violations": _violations_json(answer),
        "smallest_gpus_that_fit": answer.smallest_gpus,
        "search_seconds": round(seconds, 3),
        **_notes_json(answer),
        "memory_front": [
            {
                "reserved_gib": encode(point.reserved / GIB),
                "step_seconds": encode(point.seconds),
                "layout": layout_json(point.judgement.layout),
            }
            for point in answer.memory_front
        ],
        "gpu_front": list(_gpu_front(answer.sizes or answer.found)),
        "sizes": [_size_json(sized) for sized in answer.sizes],
    }


def _violations_json(answer: Answer) -> list[Json]:
    """Return the rules that stand in the way where no layout is legal."""
    last = answer.found[-1]
    if answer.plans or last.result.nearest_miss is not None:
        return []
    return [encode(violation) for violation in _plainest(answer, last)[1]]


def _notes_json(answer: Answer) -> dict[str, object]:
    """Return what is said of the best plan besides its numbers."""
    if len(answer.found) > 1 or not answer.plans:
        return {}
    inputs = (answer.model, answer.found[0].job, answer.found[0].cluster)
    plans = answer.found[0].result.plans
    return {
        "advice": list(advice(*inputs, plans, answer.constraints)),
        "margins": [encode(margin) for margin in margins(*inputs, plans[0])],
    }


def _gpu_front(sizes: Sequence[Sized]) -> tuple[int, ...]:
    """Return the counts of GPUs that train faster than every smaller count, token for token."""
    fitting = [sized for sized in sizes if sized.result.plans]
    if len(sizes) == 1:
        return ()
    front = non_dominated(
        fitting,
        lambda sized: sized.cluster.num_gpus,
        lambda sized: _seconds_per_token((sized, sized.result.plans[0])),
    )
    return tuple(sized.cluster.num_gpus for sized in front)


def _size_json(sized: Sized) -> dict[str, object]:
    size: dict[str, object] = {"gpus": sized.cluster.num_gpus, "layout": None, "step_seconds": None}
    for best in sized.result.plans[:1]:
        assert best.time is not None
        size |= {
            "layout": layout_json(best.layout),
            "step_seconds": encode(best.time.step_seconds),
        }
    return size


def _status(answer: Answer) -> str:
    with_plans = [found.result.status for found in answer.found if found.result.plans]
    if not with_plans:
        return "infeasible"
    return "optimal" if all(status == "optimal" for status in with_plans) else "feasible"


def _plainest(answer: Answer, found: Sized) -> tuple[Layout, tuple[Violation, ...]]:
    return plainest_and_its_violations(answer.model, found.job, found.cluster, answer.constraints)


def _miss_json(answer: Answer, miss: NearestMiss | None) -> dict[str, Json] | None:
    if miss is None:
        return None
    found = answer.found[-1]
    relaxations: list[Json] = [
        {"change": one.change, "gpus": one.gpus, "layout": encode(one.layout)}
        for one in miss.relaxations
    ]
    return {
        "estimate": judgement_json(miss.judgement, answer.model, found.job, found.cluster),
        "lacking_gib": encode(miss.lacking_gib),
        "memory": "host" if miss.of_host else "device",
        "stage": miss.stage,
        "part": miss.part,
        "relaxations": relaxations,
    }


def answer_lines(answer: Answer) -> list[str]:
    """Return what people read."""
    if len(answer.found) > 1:
        lines = _size_lines(answer.found)
        if answer.smallest_gpus is not None:
            lines.append(f"the fewest GPUs that fit: {answer.smallest_gpus}")
        return lines
    (found,) = answer.found
    lines = [heading(answer.model, found.job, found.cluster), ""]
    if answer.smallest_gpus is not None:
        lines.insert(1, f"the fewest GPUs that fit: {answer.smallest_gpus}")
    if found.result.plans:
        lines += [*ranking_table(found.result.plans), "", *_reason_lines(answer, found)]
    else:
        lines += _miss_lines(answer, found)
    return [*lines, _census_line(found.result)]


def _reason_lines(answer: Answer, found: Sized) -> list[str]:
    result, inputs = found.result, (answer.model, found.job, found.cluster)
    best = result.plans[0]
    assert best.time is not None
    spent = ", ".join(
        f"{kind} {100 * share:.0f} %" for kind, share in limits(best.time, best.layout)[:3]
    )
    lines = [f"row 1 spends its step on {spent}"]
    if len(result.plans) > 1:
        lines.append(f"row 1 against row 2: {why_first(best, result.plans[1])}")
    if best.verdict.value != "fits":
        lines.append("nothing fits safely; these may run out of memory")
    lines += advice(*inputs, result.plans, answer.constraints)
    lines.append("row 1, changed by hand:")
    lines += [f"  {margin.says}" for margin in margins(*inputs, best)]
    if answer.memory_front:
        lines += ["", "time against memory: the fastest layout that reserves no more"]
        lines += [
            f"  {point.reserved / GIB:>6.1f} GiB {point.seconds:>9.4g} s  "
            f"{layout_words(point.judgement.layout)}"
            for point in answer.memory_front
        ]
    if answer.sizes:
        lines += ["", "time against GPUs: the fastest layout of each count"]
        lines += _size_lines(answer.sizes)
    return lines


def _miss_lines(answer: Answer, found: Sized) -> list[str]:
    miss = found.result.nearest_miss
    if miss is None:
        layout, broken = _plainest(answer, found)
        lines = [f"  {violation.rule}: {violation.message}" for violation in broken]
        asked = [f"asked for: {layout_words(layout)}"] if broken else []
        return ["no layout is legal under these constraints", *asked, *lines]
    where = "host memory per node" if miss.of_host else f"the GPUs of pipeline rank {miss.stage}"
    lines = [
        "nothing fits",
        f"nearest miss: {layout_words(miss.judgement.layout)}",
        f"  lacks {miss.lacking_gib:.1f} GiB in {where}; the largest part is {miss.part}",
    ]
    return lines + [
        f"  fits with {one.change} ({one.gpus} GPUs): {layout_words(one.layout)}"
        for one in miss.relaxations
    ]


def _census_line(result: SearchResult) -> str:
    most = sorted(result.rejected.items(), key=lambda item: (-item[1], item[0]))[:REASONS]
    reasons = ", ".join(f"{rule} {count:,}" for rule, count in most)
    counted = (
        f"{result.num_layouts:,} layouts, {result.num_legal:,} legal; rejected: {reasons}, ..."
    )
    if result.status == "optimal":
        return f"{counted}\noptimal: no layout of this space is predicted faster"
    if result.status == "feasible":
        return f"{counted}\nfeasible: at most {100 * result.gap:.2f} % from the best (not proved)"
    return f"{counted}\ninfeasible"


def _size_lines(sizes: Sequence[Sized]) -> list[str]:
    lines = [f"{'GPUs':>7} {'step s':>9} {'tok/s/GPU':>10} {'MFU':>7}  layout"]
    front = _gpu_front(sizes)
    for found in sizes:
        gpus = found.cluster.num_gpus
        if not found.result.plans:
            lines.append(f"{gpus:>7} {'':>28}  nothing fits")
            continue
        best = found.result.plans[0]
        assert best.time is not None
        words = layout_words(best.layout)
        if best.verdict.value != "fits":
            words += f"  ({VERDICT_WORDS[best.verdict.value]})"
        if gpus not in front:
            words += "  (no faster than fewer GPUs)"
        rate = best.time.tokens_per_second_per_gpu
        lines.append(
            f"{gpus:>7} {best.time.step_seconds:>9.4g} {rate:>10,.0f} "
            f"{100 * best.time.mfu:>5.1f} %  {words}"
        )
    return lines
