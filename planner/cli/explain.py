"""`planner explain`: why this plan, why not another, what if."""

import argparse
import json
from argparse import ArgumentParser, Namespace
from math import isclose
from pathlib import Path
from typing import TYPE_CHECKING

from planner.cli import NoAnswerError

if TYPE_CHECKING:
    from planner.explain.reasons import Bill
    from planner.explain.what_if import Changed
    from planner.judge import Judgement
    from planner.plan import Plan

EXAMPLE = "planner explain plan.json --why-not tp=8,pp=2"
SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
SAME = 1e-6  # chosen: beyond the digits of a plan file


def add_arguments(parser: ArgumentParser) -> None:
    """Add the verb's flags."""
    parser.add_argument("plan", type=Path, metavar="PLAN", help="written by planner search -o")
    parser.add_argument("--why-not", metavar="AXIS=N,...", help="another layout beside the plan's")
    parser.add_argument(
        "--what-if",
        metavar="KEY=VALUE",
        help="plan again with another link, memory, seq_len, global_batch_size or gpus",
    )
    parser.add_argument("--formulas", action="store_true", help="formulas with numbers in")
    parser.add_argument("--tokens", type=_tokens, metavar="N", help="days and GPU-hours for 1T")
    parser.add_argument("--dollars-per-gpu-hour", type=_price, metavar="D", help="adds the cost")


def run(arguments: Namespace) -> int:
    """Explain the plan, or answer one question about it."""
    from planner.plan import read_plan

    _refuse_unheard(arguments)
    plan = read_plan(arguments.plan)
    if arguments.why_not is not None:
        document, lines = _why_not(plan, arguments.why_not)
    elif arguments.what_if is not None:
        document, lines = _what_if(plan, arguments.what_if)
    else:
        document, lines = _why(plan, arguments)
    print(json.dumps({"schema": 1, **document}) if arguments.json else "\n".join(lines))
    return 0


def _refuse_unheard(arguments: Namespace) -> None:
    """Refuse flags that the answer would not heed."""
    questions = {"--why-not": arguments.why_not, "--what-if": arguments.what_if}
    asked = [flag for flag, question in questions.items() if question is not None]
    beside = {"--formulas": arguments.formulas, "--tokens": arguments.tokens}
    others = [flag for flag, value in beside.items() if value]
    if len(asked) > 1 or (asked and others):
        raise ValueError(f"{' and '.join((*asked, *others))} are questions of their own: ask one")
    if arguments.dollars_per_gpu_hour is not None and not arguments.tokens:
        raise ValueError("--dollars-per-gpu-hour prices --tokens; name how many")


def _why(plan: "Plan", arguments: Namespace) -> tuple[dict[str, object], list[str]]:
    from planner.codec import encode
    from planner.explain.reasons import NOTICEABLE, bill, limits
    from planner.explain.sensitivity import sensitivities
    from planner.judge import judge
    from planner.report import judgement_text

    judgement = judge(plan.model, plan.job, plan.cluster, plan.layout)
    if judgement.time is None:
        raise NoAnswerError(f"the plan is illegal: {judgement.violations[0].message}")
    shares, moves = limits(judgement.time, judgement.layout), sensitivities(plan)
    lines = [judgement_text(judgement, plan.model, plan.job, plan.cluster), ""]
    lines.append("what the step is spent on:")
    lines += [f"  {100 * share:>5.1f} %  {kind}" for kind, share in shares if share > NOTICEABLE]
    lines.append("10 % better would make the step faster by")
    lines += [f"  {100 * move.gain:>5.1f} %  {move.key}" for move in moves]
    document: dict[str, object] = {
        "limits": dict(shares),
        "sensitivities": {move.key: move.gain for move in moves},
        "solver": encode(plan.solver),
    }
    if arguments.tokens:
        cost = bill(judgement.time, arguments.tokens, arguments.dollars_per_gpu_hour)
        lines.append(_bill_words(cost))
        document["bill"] = encode(cost)
    if arguments.formulas:
        from planner.explain.formulas import lines_of, worked_formulas

        worked = worked_formulas(plan)
        lines += [line for one in worked for line in ("", *lines_of(one))]
        document["formulas"] = [encode(one) for one in worked]
    lines.append(_solver_words(plan, judgement.time.step_seconds))
    return document, lines


def _why_not(plan: "Plan", question: str) -> tuple[dict[str, object], list[str]]:
    from planner.explain.question import answer, why_not
    from planner.explain.reasons import side_by_side
    from planner.report import layout_words

    ours, theirs = why_not(plan, question)
    words = answer(ours, theirs)
    lines = [f"plan:  {layout_words(ours.layout)}", f"asked: {layout_words(theirs.layout)}", words]
    if theirs.time is not None:
        lines += side_by_side(ours, theirs)
    document: dict[str, object] = {
        "answer": words,
        "plan": _estimate(plan, ours),
        "asked": _estimate(plan, theirs),
    }
    return document, lines


def _what_if(plan: "Plan", change: str) -> tuple[dict[str, object], list[str]]:
    from planner.contract import judgement_json
    from planner.explain.what_if import what_if

    changed = what_if(plan, change)
    best, after = changed.best, (plan.model, changed.job, changed.cluster)
    document: dict[str, object] = {
        "key": changed.key,
        "old": changed.old,
        "new": changed.new,
        "threshold": changed.threshold,
        "before": _estimate(plan, changed.before),
        "after": judgement_json(changed.after, *after),
        "best": None if best is None else judgement_json(best, *after),
    }
    return document, _what_if_lines(changed)


def _what_if_lines(changed: "Changed") -> list[str]:
    from planner.report import layout_words

    lines = [
        f"{changed.key}: {changed.old:g} -> {changed.new:g}",
        f"the plan now:      {_outcome(changed.before)}",
        f"the same layout:   {_outcome(changed.after)}",
    ]
    if changed.best is None:
        return [*lines, "no layout is legal and fits then"]
    if changed.best.layout == changed.after.layout:
        return [*lines, "the plan's layout stays the best"]
    lines.append(f"the best then:     {_outcome(changed.best)}")
    lines.append(f"                   {layout_words(changed.best.layout)}")
    if changed.threshold is not None:
        way = "upwards" if changed.new > changed.old else "downwards"
        words = f"from {changed.threshold:.6g} {way}"
        lines.append(f"it is ahead of the plan's layout, or that no longer fits, {words}")
    return lines


def _outcome(judgement: "Judgement") -> str:
    from planner.report import VERDICT_WORDS

    if judgement.time is None:
        return f"illegal: {judgement.violations[0].message}"
    rate = judgement.time.tokens_per_second_per_gpu
    words = VERDICT_WORDS[judgement.verdict.value]
    return f"{words}, step {judgement.time.step_seconds:.4g} s, {rate:,.0f} tokens/s/GPU"


def _estimate(plan: "Plan", judgement: "Judgement") -> object:
    from planner.contract import judgement_json

    return judgement_json(judgement, plan.model, plan.job, plan.cluster)


def _bill_words(cost: "Bill") -> str:
    named = [name for name, size in SUFFIXES.items() if cost.tokens >= size]
    tokens = f"{cost.tokens / SUFFIXES[named[-1]]:.4g}{named[-1]}" if named else f"{cost.tokens:g}"
    words = f"{tokens} tokens take {cost.days:.1f} days, {cost.gpu_hours:,.0f} GPU-hours"
    return words if cost.dollars is None else f"{words}, {cost.dollars:,.0f} dollars"


def _solver_words(plan: "Plan", seconds: float) -> str:
    """Say what the search proved, if the layout is still the one that it judged."""
    solver, time = plan.solver, plan.estimate.get("time")
    written = time.get("step_seconds") if isinstance(time, dict) else None
    if not isinstance(written, float | int) or not isclose(written, seconds, rel_tol=SAME):
        return (
            f"the plan file says a step of {written} s, but its layout takes {seconds:.4g} s: it "
            "was changed since its search, or comes from another version, and nothing is proved"
        )
    if solver.status == "optimal":
        return (
            f"optimal: none of {solver.num_layouts:,} layouts is predicted faster "
            f"({solver.num_solved} solved, the others bounded away)"
        )
    return f"{solver.status}: not proved to be the best"


def _tokens(text: str) -> float:
    factor = SUFFIXES.get(text[-1:].upper(), 1.0)
    digits = text[:-1] if factor > 1 else text
    try:
        value = float(digits) * factor
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens (1T, 300B)") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} tokens make no sense")
    return value


def _price(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no price") from None
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no price")
    return value
