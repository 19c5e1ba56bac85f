"""How many layers each stage must recompute to fit, at least, for whole tables of layouts.

The fullest rank holds at least `memory_lower_bound` bytes when nothing is recomputed. Recomputing k
layers in each of its stages gives back at most

    k * (micro-batches in flight on the rank) * (kept - recomputed bytes of a layer)

so k is at least what is missing over that, with the rank that holds most micro-batches and the
layer that gives back most. Where recomputing every layer does not fit, no k does; nor where what
split backwards put off (`put_off.py`) does not.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from costmodels.bounds.memory import memory_lower_bound
from costmodels.bounds.put_off import put_off
from costmodels.hardware import Cluster
from costmodels.job import TrainingJob
from costmodels.layout import Recompute
from costmodels.layout_table import RECOMPUTES, LayoutTable
from costmodels.memory.activations import layer_bytes
from costmodels.memory.framework import growth
from costmodels.model import ModelSpec
from costmodels.schedule import in_flight_closed_form
from costmodels.virtual_splits import longest_stages

Column = NDArray[np.float64]


def least_recomputed_layers(
    model: ModelSpec,
    job: TrainingJob,
    cluster: Cluster,
    table: LayoutTable,
    *,
    limit: float,
    known_splits: bool = False,
) -> Column:
    """Return layers per stage that must be recomputed in full; inf where even all do not fit.

    Args:
        model: The network.
        job: What is trained per step.
        cluster: The machine.
        table: Layouts; their own recomputation is not read.
        limit: Bytes that a rank may reserve.
        known_splits: With several stages per rank, only the row's own split counts.

    """
    nothing = with_recompute(table, Recompute.NONE)
    everything = with_recompute(table, Recompute.FULL)
    inputs = (model, job, cluster)
    held = memory_lower_bound(*inputs, nothing, known_splits=known_splits, limit=limit)
    missing = held - limit
    least = np.zeros(len(table))
    short = np.flatnonzero(missing > 0)
    if len(short):
        gain = _most_given_back(*inputs, nothing.take(short), limit)
        needed = np.ceil(missing[short] / np.maximum(gain, 1.0) - 1e-9)
        redone = memory_lower_bound(
            *inputs, everything.take(short), known_splits=known_splits, limit=limit
        )
        least[short] = np.where(redone <= limit, np.maximum(needed, 1.0), np.inf)
        may = short[redone <= limit]
        left = put_off(*inputs, everything.take(may), limit=limit, known_splits=known_splits)
        least[may] = np.maximum(least[may], np.where(left.bound > limit, np.inf, left.least))
        if known_splits:
            least[least > longest_stages(model.num_layers, table)] = np.inf
    return least


def with_recompute(table: LayoutTable, recompute: Recompute) -> LayoutTable:
    """Return the table with one kind of recomputation everywhere."""
    return replace(table, recompute=np.full(len(table), RECOMPUTES.index(recompute)))


def _most_given_back(
    model: ModelSpec, job: TrainingJob, cluster: Cluster, table: LayoutTable, limit: float
) -> Column:
    """Return bytes that recomputing one more layer per stage gives back, at most."""
    layers = [layer_bytes(model, job, kind, table) for kind in model.kinds_by_size]
    per_layer = np.maximum.reduce([layer.kept - layer.recomputed for layer in layers])
    shape = (
        table.schedule,
        table.pipeline_parallel,
        table.stages_per_rank,
        table.num_micro_batches,
    )
    ends = (np.zeros(len(table), dtype=np.int64), table.pipeline_parallel - 1)
    in_flight = np.maximum.reduce([in_flight_closed_form(*shape, rank) for rank in ends])
    grown = growth(job, cluster, limit)
    stays: Column = np.where(table.offload_activations > 0, 0.0, in_flight * per_layer * grown)
    return stays
