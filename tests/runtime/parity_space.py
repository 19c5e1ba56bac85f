"""Which layouts the parity suite runs: the planner's own space, and small covers of it.

Layouts come from the search under the rules of the native runtime, so that whatever it may choose
is what is checked. A cover is a subset in which every pair (or triple) of choices of the axes,
schedules, stages of ZeRO, recomputations still occurs.
"""

import heapq
from functools import cache
from itertools import combinations

from parity_cases import ALL, JOB

from costmodels.hardware import Cluster
from costmodels.layout import Recompute, Schedule, split_layers
from costmodels.profiles.reader import read_profile
from planner.constraints import Constraints
from planner.search.space import legal_table, space_of

PAIRS, TRIPLES = 2, 3


@cache
def layouts(name, num_ranks):
    """Return every layout of a model on some ranks that the search may choose for the runtime.

    Both nodes of all ranks and of half of them, which gives HSDP its smaller groups; four
    micro-batches, and in some pipelines eight; uneven stages too. Nothing is offloaded: on CPUs the
    host is the device. Context degrees are asked for: unasked, no search splits so short sequences.
    """
    found = {}
    for per_node in {num_ranks, max(num_ranks // 2, 1)}:
        cluster = Cluster(
            profile=read_profile("cpu-gloo"), num_gpus=num_ranks, gpus_per_node=per_node
        )
        asked = Constraints(runnable=True, offload=((),), context_parallel=(1, 2, 4))
        table = legal_table(space_of(ALL[name], JOB, cluster, asked))
        for row in range(len(table)):
            if table.context_parallel[row] > 1 and row % 7:  # three kinds of it: a sample is enough
                continue
            long = table.num_micro_batches[row] == 8 and table.pipeline_parallel[row] > 1
            if table.num_micro_batches[row] == 4 or (long and row % 4 == 0):
                layout = _with_layers(table, row)
                found[layout] = None
    return list(found)


def _with_layers(table, row):
    stages = int(table.pipeline_parallel[row] * table.stages_per_rank[row])
    layers = split_layers(8, stages)
    if stages == 2 and row % 2:
        layers = (3, 5)
    full = table.recompute[row] == list(Recompute).index(Recompute.FULL)
    return table.layout(row, layers, int(full and row % 3 == 0 and min(layers)))


def cover(candidates, size=PAIRS, *, experts_only=False):
    """Return a cheap subset in which every combination of choices of the candidates occurs.

    Greedy by new combinations per cost; a combination's gain only falls, so that a candidate whose
    gain is still the best after another look is the best of all.

    Args:
        candidates: Layouts.
        size: Choices in a combination: PAIRS or TRIPLES.
        experts_only: Combinations count only where experts are spread.

    """
    holds = [_combinations(layout, size, experts_only) for layout in candidates]
    missing = set().union(*holds)
    waiting = [
        (-len(held) / cost(layout), i)
        for i, (layout, held) in enumerate(zip(candidates, holds, strict=True))
    ]
    heapq.heapify(waiting)
    chosen = []
    while missing:
        _, i = heapq.heappop(waiting)
        gain = len(holds[i] & missing) / cost(candidates[i])
        if waiting and gain < -waiting[0][0]:
            heapq.heappush(waiting, (-gain, i))
            continue
        chosen.append(candidates[i])
        missing -= holds[i]
    return chosen


def by_importance(candidates, *, experts_only=False):
    """Return a cover of all pairs, then what it lacks of one of all triples, then the others."""
    pairs = cover(candidates, PAIRS, experts_only=experts_only)
    triples = cover(candidates, TRIPLES, experts_only=experts_only)
    covering = list(dict.fromkeys((*pairs, *triples)))
    known = set(covering)
    return covering, [layout for layout in candidates if layout not in known]


def share_of_model(models, name, cases):
    """Return a model's share of layouts, each of which meets one of the models."""
    return cases[list(models).index(name) :: len(models)]


def cost(layout):
    """Return what a layout's processor time grows with: passes of a layer over all ranks."""
    return layout.num_micro_batches * layout.num_gpus / layout.pipeline_parallel


def is_plain(layout):
    """Tell whether a layout splits over data, tensor and a pipeline of gpipe or 1f1b alone."""
    schedule = layout.schedule in {Schedule.GPIPE, Schedule.ONE_F_ONE_B}
    return layout.context_parallel == 1 and (schedule or layout.pipeline_parallel == 1)


def spreads_experts(layout):
    """Tell whether ranks hold different experts."""
    return layout.expert_parallel * layout.expert_tensor_parallel > 1


def _combinations(layout, size, experts_only):
    every = combinations(choices(layout).items(), size)
    spread = ("ep", "etp")
    return frozenset(
        chosen
        for chosen in every
        if not experts_only or any(key in spread and value > 1 for key, value in chosen)
    )


def choices(layout):
    """Return what a layout chose, by the name of the choice."""
    pipeline, context = layout.pipeline_parallel > 1, layout.context_parallel > 1
    return {
        "tp": layout.tensor_parallel,
        "dp": layout.data_parallel,
        "pp": layout.pipeline_parallel,
        "vpp": layout.stages_per_rank,
        "zero": (layout.zero_stage, is_hybrid(layout)),
        "group": layout.zero_group,
        "schedule": str(layout.schedule) if pipeline else "",
        "uneven": len(set(layout.layers_per_stage)) > 1,
        "recompute": (str(layout.recompute), layout.recompute_layers > 0),
        "sp": layout.sequence_parallel,
        "cp": (layout.context_parallel, str(layout.context_parallel_type) if context else ""),
        "ep": layout.expert_parallel,
        "etp": layout.expert_tensor_parallel,
    }


def is_hybrid(layout):
    """Tell whether states are cut over a part of the ranks that could share them (HSDP)."""
    ways = layout.data_parallel * layout.context_parallel
    return layout.zero_stage > 0 and 1 < layout.zero_group < ways


def facts(layout):
    """Return what the table of passed layouts counts, as JSON carries it."""
    picked = choices(layout)
    axes = {key: picked[key] for key in ("dp", "tp", "pp", "ep", "etp")}
    return {
        "axes": {**axes, "cp": layout.context_parallel},
        "context": picked["cp"][1],
        "schedule": picked["schedule"],
        "zero": layout.zero_stage,
        "hybrid": is_hybrid(layout),
        "recompute": str(layout.recompute),
        "ranks": layout.num_gpus,
    }
