"""Activations on their way to the host and back (`--offload activations`)."""

import numpy as np
from numpy.typing import NDArray

from costmodels.job import TrainingJob
from costmodels.layout import Recompute
from costmodels.layout_table import RECOMPUTES, LayoutTable
from costmodels.memory.activations import layer_bytes
from costmodels.model import LayerKind, ModelSpec
from costmodels.time.rates import Rates

Seconds = NDArray[np.float64]


def seconds_to_host(
    model: ModelSpec,
    job: TrainingJob,
    kind: LayerKind,
    table: LayoutTable,
    rates: Rates,
    *,
    modules: tuple[str, ...] = (),
) -> Seconds | None:
    """Return how long a layer's activations travel one way; None where no layout offloads them.

    Where a number of layers is recomputed in full, all are taken as such: inputs alone travel.

    Args:
        model: The network.
        job: What is trained per step.
        kind: Of the layer.
        table: Layouts.
        rates: The link to the host, one direction.
        modules: What selective recomputation runs again; the target's habit when empty.

    """
    if not table.offload_activations.any():
        return None
    activations = layer_bytes(model, job, kind, table, modules)
    is_full = table.recompute == RECOMPUTES.index(Recompute.FULL)
    moved = np.where(is_full, activations.recomputed, activations.kept)
    seconds: Seconds = np.where(table.offload_activations > 0, moved / rates.host_bandwidth, 0.0)
    return seconds
