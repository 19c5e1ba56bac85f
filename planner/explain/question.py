"""One layout beside the plan's: `--why-not tp=8,pp=2`.

Words are axis=value; axes that are not named stay as in the plan, data parallel follows from the
GPUs, micro-batches from the batch, and under full recomputation the fewest layers that fit are
recomputed. A schedule that the named pipeline cannot run gives way to 1F1B. Where the number of
stages is another one, layers are split as the search would split them.
"""

from bisect import bisect_left
from dataclasses import replace

from costmodels.layout import (
    ContextParallelType,
    Layout,
    Offload,
    Recompute,
    Schedule,
    split_layers,
)
from costmodels.memory.estimate import estimate_memory
from planner.constraints import only
from planner.judge import Judgement, Verdict, judge, memory_verdict
from planner.plan import Plan
from planner.rules import violations
from planner.rules.own_splits import own_splits
from planner.rules.rule import CUTS_PARAMETERS
from planner.search.ranking import search

AXES = {
    "dp": "data_parallel",
    "tp": "tensor_parallel",
    "pp": "pipeline_parallel",
    "cp": "context_parallel",
    "ep": "expert_parallel",
    "etp": "expert_tensor_parallel",
    "mbs": "micro_batch_size",
    "vpp": "stages_per_rank",
    "zero": "zero_stage",
    "zero_group": "zero_group",
    "recompute_layers": "recompute_layers",
}
CHOICES = {"schedule": Schedule, "recompute": Recompute, "cp_type": ContextParallelType}
OFFLOAD = "offload"
FIELDS = {
    "schedule": "schedule",
    "recompute": "recompute",
    "cp_type": "context_parallel_type",
    OFFLOAD: OFFLOAD,  # parts are joined by +, since commas part the words
}


def asked_layout(plan: Plan, question: str) -> Layout:
    """Return the layout that a question names.

    Raises:
        ValueError: A word is not axis=value, or its axis or value is unknown.

    """
    changes: dict[str, object] = {}
    for word in question.split(","):
        name, equals, text = word.strip().partition("=")
        name = name.replace("-", "_")
        field = AXES.get(name, name if name in AXES.values() else FIELDS.get(name))
        if not equals or field is None:
            known = ", ".join((*AXES, *FIELDS))
            raise ValueError(f"--why-not {word!r}: write AXIS=VALUE with one of {known}")
        if field in changes:
            raise ValueError(f"--why-not {question!r} names {name} twice")
        changes[field] = _value(word, name, field, text)
    return _completed(plan, changes)


def _value(word: str, name: str, field: str, text: str) -> object:
    if name == OFFLOAD:
        return _offload(text)
    if name in CHOICES:
        return _choice(name, text)
    return _count(word, text, least=0 if field in ("zero_stage", "recompute_layers") else 1)


def _offload(text: str) -> tuple[Offload, ...]:
    if text == "none":
        return ()
    known = [part.value for part in Offload]
    wrong = [part for part in text.split("+") if part not in known]
    if wrong:
        raise ValueError(f"--why-not offload={text}: none, or parts of {', '.join(known)} with +")
    named = {Offload(part) for part in text.split("+")}
    if Offload.PARAMETERS in named:  # parameters imply the optimizer
        named.add(Offload.OPTIMIZER)
    return tuple(part for part in Offload if part in named)


def why_not(plan: Plan, question: str) -> tuple[Judgement, Judgement]:
    """Return the plan's layout and the asked one, both judged."""
    inputs = (plan.model, plan.job, plan.cluster)
    return judge(*inputs, plan.layout), judge(*inputs, asked_layout(plan, question))


def answer(ours: Judgement, theirs: Judgement) -> str:
    """Return in words why the asked layout was not chosen."""
    if theirs.verdict is Verdict.ILLEGAL:
        broken = theirs.violations[0]
        return f"illegal, {broken.rule}: {broken.message}"
    if not theirs.runs:
        return f"does not fit: {theirs.violations[0].message}"
    assert ours.time is not None
    assert theirs.time is not None
    slower = theirs.time.step_seconds / ours.time.step_seconds - 1
    if slower < 0:
        words = f"{-100 * slower:.1f} % faster than the plan"
        return f"{words}, but at risk" if theirs.verdict is Verdict.AT_RISK else words
    return f"{100 * slower:.1f} % slower than the plan"


def _completed(plan: Plan, changes: dict[str, object]) -> Layout:
    layout = replace(plan.layout, **changes)  # type: ignore[arg-type]  # names are fields
    if "schedule" not in changes:
        layout = _runnable_schedule(plan, layout, changes)
    others = layout.tensor_parallel * layout.pipeline_parallel * layout.context_parallel
    if "data_parallel" not in changes:
        layout = replace(layout, data_parallel=max(1, plan.cluster.num_gpus // others))
    per_forward = layout.data_parallel * layout.micro_batch_size
    shards = layout.data_parallel * layout.context_parallel
    was = plan.layout.data_parallel * plan.layout.context_parallel
    keeps_split = layout.num_stages == plan.layout.num_stages
    keeps_tensor = layout.tensor_parallel == plan.layout.tensor_parallel
    layout = replace(
        layout,
        num_micro_batches=max(1, plan.job.global_batch_size // per_forward),
        zero_group=layout.zero_group if shards == was or "zero_group" in changes else shards,
        keep_gathered=layout.keep_gathered and layout.zero_stage == CUTS_PARAMETERS,
        sequence_parallel=(
            layout.sequence_parallel if keeps_tensor else layout.tensor_parallel > 1
        ),
        layers_per_stage=(
            layout.layers_per_stage
            if keeps_split
            else split_layers(plan.model.num_layers, layout.num_stages)
        ),
    )
    if not keeps_split:
        layout = _split_at_best(plan, layout, stated=changes.get("recompute_layers"))
    return layout if "recompute_layers" in changes else _least_recomputed(plan, layout)


def _split_at_best(plan: Plan, layout: Layout, *, stated: object) -> Layout:
    """Return a layout with its fastest split that fits; unchanged where none does."""
    inputs = (plan.model, plan.job, plan.cluster)
    if layout.num_stages == 1 or violations(*inputs, layout):
        return layout
    asked = replace(
        only(layout),
        splits=own_splits(plan.job.target, plan.model),
        recompute_layers=stated if isinstance(stated, int) else None,
    )
    found = search(*inputs, asked, top=1, only_fitting=True).plans
    return found[0].layout if found else layout


def _runnable_schedule(plan: Plan, layout: Layout, changes: dict[str, object]) -> Layout:
    """Return the layout with a schedule that its pipeline can run, where the plan's cannot."""
    if layout.pipeline_parallel == 1 and plan.layout.pipeline_parallel > 1:
        per_rank = layout.stages_per_rank if "stages_per_rank" in changes else 1
        return replace(layout, schedule=Schedule.ONE_F_ONE_B, stages_per_rank=per_rank)
    if layout.stages_per_rank > 1 and plan.layout.stages_per_rank == 1:
        return replace(layout, schedule=Schedule.INTERLEAVED)
    if layout.stages_per_rank == 1 and plan.layout.stages_per_rank > 1:
        return replace(layout, schedule=Schedule.ONE_F_ONE_B)
    return layout


def _least_recomputed(plan: Plan, layout: Layout) -> Layout:
    """Return a layout that recomputes the fewest layers per stage that fit, all where none do."""
    every = replace(layout, recompute_layers=0)
    inputs = (plan.model, plan.job, plan.cluster)
    if layout.recompute is not Recompute.FULL or violations(*inputs, every):
        return every

    def fits(count: int) -> bool:
        memory = estimate_memory(*inputs, replace(layout, recompute_layers=count))
        return memory_verdict(memory, plan.cluster) is Verdict.FITS

    # Memory falls with the number of recomputed layers.
    counts = range(1, max(layout.layers_per_stage))
    fewest = bisect_left(counts, x=True, key=fits)
    return replace(layout, recompute_layers=counts[fewest]) if fewest < len(counts) else every


def _choice(name: str, text: str) -> object:
    kind = CHOICES[name]
    known = [member.value for member in kind]
    if text not in known:
        raise ValueError(f"--why-not {name}={text}: one of {', '.join(known)}")
    return kind(text)


def _count(word: str, text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"--why-not {word}: a whole number of at least {least}")
    return int(text)
