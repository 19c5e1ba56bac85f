"""Which layouts are legal, for which target, and what would be.

Rules are data (`rule.py`): `violations` judges one layout with the same predicates that
`legal_mask` applies to a table. Tables of the targets: one file each.
"""

from collections.abc import Sequence

import numpy as np

from costmodels.config_keys import MAX_COUNT
from costmodels.hardware import Cluster
from costmodels.job import Target, TrainingJob
from costmodels.layout import Layout
from costmodels.layout_table import LayoutTable, table_of
from costmodels.model import ModelSpec
from planner.rules import accelerate, deepspeed, megatron, nanotron, native, torchtitan
from planner.rules.allowed import allowed_values
from planner.rules.expressible import expressible_rules
from planner.rules.partition import Inputs, broken_rules
from planner.rules.rule import Case, Fact, Mask, Rule, Violation, facts

__all__ = [
    "Case",
    "Mask",
    "Rule",
    "Violation",
    "apply_violations",
    "legal_mask",
    "rules_of",
    "violations",
]

MOST_OFFERS = 12  # chosen: what fits a line of a message
POSITIVE_FIELDS = (
    "data_parallel",
    "tensor_parallel",
    "pipeline_parallel",
    "context_parallel",
    "expert_parallel",
    "expert_tensor_parallel",
    "zero_group",
    "micro_batch_size",
    "num_micro_batches",
    "stages_per_rank",
)


def rules_of(target: Target) -> tuple[Rule, ...]:
    """Return the rules of a target, in the order in which violations are reported."""
    tables = {
        Target.NATIVE: native.RULES,
        Target.MEGATRON: megatron.RULES,
        Target.TORCHTITAN: torchtitan.RULES,
        Target.DEEPSPEED: deepspeed.RULES,
        Target.NANOTRON: nanotron.RULES,
        Target.ACCELERATE: accelerate.RULES,
    }
    return tables[target]


def legal_mask(
    model: ModelSpec, job: TrainingJob, cluster: Cluster, table: LayoutTable
) -> tuple[Mask, dict[str, int]]:
    """Return which rows are legal, and how many each rule rejects (the first one broken counts).

    Args:
        model: The model.
        job: The job; its target picks the rules.
        cluster: The machine.
        table: Layouts with every degree at least 1.

    """
    case = Case(model=model, job=job, cluster=cluster, table=table)
    legal = case.always(holds=True)
    rejected: dict[str, int] = {}
    for rule in rules_of(job.target):
        broken = legal & ~rule.holds(case)
        count = int(np.count_nonzero(broken))
        if count:
            rejected[rule.name] = count
            legal &= ~broken
    return legal, rejected


def violations(
    model: ModelSpec, job: TrainingJob, cluster: Cluster, layout: Layout
) -> tuple[Violation, ...]:
    """Return every rule that a layout breaks, with what would be legal instead."""
    nonsense = tuple(f for f in POSITIVE_FIELDS if getattr(layout, f) < 1)
    if nonsense:
        return tuple(_below_one(layout, field) for field in nonsense)
    if beyond := _beyond_tables(layout):
        return beyond
    rules = rules_of(job.target)
    inputs = (model, job, cluster)
    (broken,) = broken_rules(rules, inputs, [layout])
    return tuple(_violation(rule, rules, inputs, layout) for rule in broken)


def apply_violations(
    model: ModelSpec, job: TrainingJob, cluster: Cluster, layout: Layout
) -> tuple[Violation, ...]:
    """Return what keeps a legal layout from being applied.

    The native runtime of this version may not execute it, or the configuration of another target
    has no words for it.
    """
    if beyond := _beyond_tables(layout):
        return beyond
    inputs = (model, job, cluster)
    case = Case(model=model, job=job, cluster=cluster, table=table_of([layout]))
    further = expressible_rules(job.target)
    rules = (*rules_of(job.target), *further)
    return tuple(
        _violation(rule, rules, inputs, layout) for rule in further if not rule.holds(case)[0]
    )


def _violation(rule: Rule, rules: Sequence[Rule], inputs: Inputs, layout: Layout) -> Violation:
    known = facts(*inputs, layout)
    allowed = {field: allowed_values(field, rules, inputs, layout) for field in rule.blames}
    return Violation(
        rule=rule.name,
        message=rule.says.format(**_spoken(known)) + _offer(allowed, known),
        given={key: known[key] for key in dict.fromkeys((*rule.blames, *rule.given))},
        allowed=allowed,
    )


def _below_one(layout: Layout, field: str) -> Violation:
    value = getattr(layout, field)
    return Violation(
        rule="degrees_are_positive",
        message=f"{field} must be at least 1, not {value}",
        given={field: value},
        allowed={},
    )


def _beyond_tables(layout: Layout) -> tuple[Violation, ...]:
    """Refuse sizes that no table can hold: 64-bit products of them would wrap to legal ones."""
    sizes = {field: getattr(layout, field) for field in (*POSITIVE_FIELDS, "recompute_layers")}
    sizes |= {"num_gpus": layout.num_gpus, "global_batch_size": layout.global_batch_size}
    sizes["layers_per_stage"] = max(layout.layers_per_stage, default=0)
    return tuple(
        Violation(
            rule="sizes_are_sane",
            message=f"{name} must be at most {MAX_COUNT}, not {value}",
            given={name: value},
            allowed={},
        )
        for name, value in sizes.items()
        if value > MAX_COUNT
    )


def _spoken(known: dict[str, Fact]) -> dict[str, Fact]:
    """Write tuples as people type them."""
    return {
        key: ",".join(map(str, value)) if isinstance(value, tuple) else value
        for key, value in known.items()
    }


def _offer(allowed: dict[str, tuple[Fact, ...]], known: dict[str, Fact]) -> str:
    """Say what would be legal, and which value is nearest where nearness means something."""
    offers = []
    for field, values in allowed.items():
        if not values:
            continue
        words = ", ".join(_word(value) for value in values[:MOST_OFFERS])
        more = ", ..." if len(values) > MOST_OFFERS else ""
        offers.append(f"{field} {words}{more}{_nearest(values, known[field])}")
    return "; legal here: " + "; ".join(offers) if offers else "; no change of one value helps"


def _word(value: Fact) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _nearest(values: tuple[Fact, ...], given: Fact) -> str:
    numbers = [v for v in values if isinstance(v, int) and not isinstance(v, bool)]
    if len(values) == 1 or not numbers or not isinstance(given, int):
        return ""
    nearest = min(numbers, key=lambda v: (abs(v - given), v))
    return f" (nearest {nearest})"
