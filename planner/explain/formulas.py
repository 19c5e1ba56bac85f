"""The formulas behind a plan's largest costs, with numbers in.

One instance of each kind of work: the largest product of the commonest layer, its attention, and
the largest collective on each axis. The expressions are those that the compiled model runs; each
comes with the relative derivative of its value by every quantity, from sympy. The only module of
the planner that imports sympy.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import sympy

from costmodels.formulas import collectives, compute
from costmodels.formulas.functions import Ceil, Formula
from costmodels.network.ops import Attention, Block, Collective, Gemm
from costmodels.network.shard import shard_of
from costmodels.network.workload import build_workload
from costmodels.time.placement import Tiers, place
from costmodels.time.rates import Rates, rates_of
from planner.plan import Plan

NOTICEABLE = 0.01  # chosen: derivatives below 1 % are left out

_COLLECTIVES = {
    "all_gather": "all_gather",
    "reduce_scatter": "all_gather",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
    "ring": "send",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Worked:
    """One formula with numbers in.

    Attributes:
        title: What it prices.
        expression: The formula in its symbols.
        numbers: Each quantity's name, value, unit and meaning.
        seconds: The value.
        derivatives: Relative change of the value per relative change of a quantity.

    """

    title: str
    expression: str
    numbers: tuple[tuple[str, float, str, str], ...]
    seconds: float
    derivatives: tuple[tuple[str, float], ...]


def worked_formulas(plan: Plan) -> list[Worked]:
    """Return the formulas that price a plan's commonest layer, largest of each kind."""
    shard = shard_of(plan.layout, plan.job)
    rates = rates_of(plan.job, plan.cluster.profile)
    workload = build_workload(plan.model, plan.job, shard)
    commonest, _ = Counter(plan.model.layer_kinds).most_common(1)[0]
    block = dict(workload.layers)[commonest]
    found = [_product(block, rates)]
    found += [_attention(op, rates) for op in block.ops if isinstance(op, Attention)]
    return found + _collectives(block, plan, rates)


def lines_of(worked: Worked) -> list[str]:
    """Return the lines that `planner explain --formulas` prints for one formula."""
    lines = [worked.title, f"  seconds = {worked.expression}"]
    lines += [
        f"    {name} = {value:.6g} {unit if unit != '1' else ''}".rstrip() + f"  ({meaning})"
        for name, value, unit, meaning in worked.numbers
    ]
    moves = ", ".join(f"{name} {share:+.2f} %" for name, share in worked.derivatives)
    lines.append(f"  = {worked.seconds:.4g} s; 1 % more of each: {moves}")
    return lines


def _product(block: Block, rates: Rates) -> Worked:
    products = [op for op in block.ops if isinstance(op, Gemm)]
    op = max(products, key=lambda gemm: (gemm.m * gemm.n * gemm.k * gemm.count, gemm.name))
    low = op.quantised
    numbers = {
        "m": op.m,
        "n": op.n,
        "k": op.k,
        "count": op.count,
        "element_bytes": rates.element_bytes,
        "peak": rates.low_peak if low else rates.peak,
        "gemm_efficiency": rates.low_gemm_efficiency if low else rates.gemm_efficiency,
        "k_fill": rates.low_k_fill if low else rates.k_fill,
        "num_sms": rates.num_sms,
        "tail_share": rates.tail_share,
        "memory_bandwidth": rates.memory_bandwidth,
        "memory_efficiency": rates.memory_efficiency,
        "kernel_gap": rates.kernel_gap,
    }
    return _work(f"forward of the product {op.name}", _named(compute.formulas(), "gemm"), numbers)


def _attention(op: Attention, rates: Rates) -> Worked:
    numbers = {
        "attention_flops": op.flops,
        "attention_efficiency": rates.attention_forward,
        "kernels": 1,
        "length": op.length,
        "length_fill": rates.length_fill,
        "head_width": op.head_width,
        "peak": rates.peak,
        "kernel_gap": rates.kernel_gap,
    }
    return _work("forward of attention", _named(compute.formulas(), "attention"), numbers)


def _collectives(block: Block, plan: Plan, rates: Rates) -> list[Worked]:
    placement = place(plan.layout, plan.cluster)
    largest: dict[str, Collective] = {}
    for op in block.ops:
        if isinstance(op, Collective) and _kind(op, plan) and op.payload:
            kept = largest.setdefault(op.axis, op)
            largest[op.axis] = max(kept, op, key=lambda other: other.payload)
    found = []
    for axis, op in largest.items():
        tiers: Tiers = getattr(placement, op.group)
        if int(tiers.ranks[0]) > 1:
            found.append(_collective(axis, op, _kind(op, plan), tiers, rates))
    return found


def _kind(op: Collective, plan: Plan) -> str:
    if plan.layout.sequence_parallel or op.plain_forward is None:
        return op.forward
    return op.plain_forward


def _collective(axis: str, op: Collective, kind: str, tiers: Tiers, rates: Rates) -> Worked:
    numbers = {
        "payload": op.payload,
        "inner": int(tiers.inner[0]),
        "outer": int(tiers.outer[0]),
        "inner_bandwidth": rates.inner_bandwidth,
        "outer_bandwidth": rates.outer_bandwidth,
        "inner_latency": rates.inner_latency,
        "outer_latency": rates.outer_latency,
        "base_latency": rates.base_latency,
        "across_share": 1,
    }
    title = f"{kind.replace('_', '-')} {op.name} on the {axis} axis"
    return _work(title, _named(collectives.formulas(), _COLLECTIVES[kind]), numbers)


def _named(formulas: tuple[Formula, ...], name: str) -> Formula:
    return next(formula for formula in formulas if formula.name == name)


def _work(title: str, formula: Formula, numbers: Mapping[str, float]) -> Worked:
    (_, expression), *_ = formula.results
    values = {symbol: sympy.sympify(numbers[symbol.name]) for symbol in formula.quantities}
    seconds = float(expression.subs(values))
    derivatives = []
    stepped = set[sympy.Symbol]().union(*(step.free_symbols for step in expression.atoms(Ceil)))
    for symbol in formula.quantities:
        if symbol in stepped:  # flat between steps: a derivative there says nothing
            continue
        slope = float(expression.diff(symbol).subs(values))
        share = slope * float(values[symbol]) / seconds
        if abs(share) >= NOTICEABLE:
            derivatives.append((symbol.name, share))
    return Worked(
        title=title,
        expression=str(expression),
        numbers=tuple(
            (symbol.name, float(values[symbol]), symbol.unit, symbol.meaning)
            for symbol in formula.quantities
        ),
        seconds=seconds,
        derivatives=tuple(sorted(derivatives, key=lambda pair: (-abs(pair[1]), pair[0]))),
    )
