"""Rests: for how long each unit of a rank sleeps where computation is replaced by sleeps.

The cost model's seconds of local work, block by block: every cause but communication. What the
runtime does to states for real (`runtime/measure/sleeping.py`) is left out, so that nothing counts
twice.
"""

from dataclasses import dataclass

from costmodels.hardware import Cluster
from costmodels.job import TrainingJob
from costmodels.layout import Layout, Recompute, Schedule
from costmodels.layout_table import table_of
from costmodels.model import ModelSpec
from costmodels.time.blocks import AXIS_OF_CAUSE
from costmodels.time.layouts import BlockTimes, LayoutCosts, layout_costs, rank_state_seconds
from costmodels.time.tally import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    CAUSES,
    FORWARD,
    RECOMPUTE,
    SELECTIVE,
    BlockCosts,
)

# Their backward is one action; the halves of a split one would need the unit's products.
WHOLE_BACKWARD = (Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED)
# Done for real, so nothing sleeps for it: fp32 gradients are added up per micro-batch (read and
# written), and read for their norm and cleared per step.
ACCUMULATED_BYTES = 8
CLEARED_BYTES = 8
_IS_LOCAL = [cause not in AXIS_OF_CAUSE for cause in CAUSES]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rests:
    """Seconds that one rank sleeps; what is done for real is not in them.

    Attributes:
        units: Forward, backward and (where it recomputes) forward again of every unit, per
            micro-batch, by stage.
        update: Of the optimizer, per step.

    """

    units: dict[int, tuple[tuple[float, float, float], ...]]
    update: float


def rests_of(
    model: ModelSpec, job: TrainingJob, cluster: Cluster, layout: Layout, pipeline_rank: int
) -> Rests:
    """Return what the cost model says of one pipeline rank's local work.

    Raises:
        ValueError: The layout has axes or a schedule that cannot sleep.

    """
    refuse_unsupported(layout)
    costs = layout_costs(model, job, cluster, table_of([layout]), layout.recompute_modules)
    priced = dict(costs.priced.layers)
    embedding = _rest_of(layout, costs, costs.embedding, costs.priced.embedding)
    head = _rest_of(layout, costs, costs.head, costs.priced.head)
    by_kind = {kind: _rest_of(layout, costs, times, priced[kind]) for kind, times in costs.layers}
    units: dict[int, tuple[_BlockRest, ...]] = {}
    for stage in layout.stages_of_rank(pipeline_rank):
        start = sum(layout.layers_per_stage[:stage])
        layers = model.layer_kinds[start : start + layout.layers_per_stage[stage]]
        units[stage] = (
            *((embedding,) if stage == 0 else ()),
            *(by_kind[kind] for kind in layers),
            *((head,) if stage == layout.num_stages - 1 else ()),
        )
    return Rests(
        units={
            stage: tuple((rest.forward, rest.backward, rest.again) for rest in rests)
            for stage, rests in units.items()
        },
        update=sum(rest.update for rests in units.values() for rest in rests),
    )


def refuse_unsupported(layout: Layout) -> None:
    """Refuse what a nap cannot stand for.

    Raises:
        ValueError: Names the axis or the schedule, and what is possible.

    """
    for axis in ("context_parallel", "expert_parallel", "expert_tensor_parallel"):
        if getattr(layout, axis) > 1:
            raise ValueError(
                f"{axis} = {getattr(layout, axis)}: only data, tensor and pipeline axes can sleep"
            )
    if layout.schedule not in WHOLE_BACKWARD:
        raise ValueError(
            f"schedule {layout.schedule} splits backward, which cannot sleep; possible are "
            + ", ".join(WHOLE_BACKWARD)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockRest:
    """Seconds of one block: per micro-batch, and the optimizer's per step."""

    forward: float
    backward: float
    again: float
    update: float


def _rest_of(
    layout: Layout, costs: LayoutCosts, times: BlockTimes, priced: BlockCosts
) -> _BlockRest:
    local = priced.exposed[:, _IS_LOCAL, 0].sum(axis=1)
    backward = local[BACKWARD_INPUT] + local[BACKWARD_WEIGHT]
    if layout.recompute is Recompute.SELECTIVE:
        backward += local[SELECTIVE]
    weights = float(times.weights.dense[0] + times.weights.experts[0])
    per_byte = 1 / (costs.rates.memory_bandwidth * costs.rates.memory_efficiency)
    _, _, update = rank_state_seconds(costs.states, times.weights)
    return _BlockRest(
        forward=float(local[FORWARD]),
        backward=max(float(backward) - weights * ACCUMULATED_BYTES * per_byte, 0.0),
        again=float(local[RECOMPUTE]),
        update=max(float(update[0]) - weights * CLEARED_BYTES * per_byte, 0.0),
    )
