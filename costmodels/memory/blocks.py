"""Bytes of every block of many layouts: one value per layout in each array.

What `memory` and its bound share: states, activations, head and loss, transients, communicators.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodels.hardware import Cluster
from costmodels.job import TrainingJob
from costmodels.layout_table import LayoutTable
from costmodels.memory.activations import LayerBytes, layer_bytes
from costmodels.memory.framework import communicator_bytes
from costmodels.memory.head import HeadBytes, head_bytes
from costmodels.memory.states import BlockStates, embedding_states, head_states, layer_states
from costmodels.memory.transients import Transients, transients
from costmodels.model import LayerKind, ModelSpec
from costmodels.rows import take_rows

Column = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMemory:
    """Allocated bytes of every block of some layouts: one value per layout in each array."""

    kinds: tuple[LayerKind, ...]
    layer_states: tuple[BlockStates, ...]
    layer_bytes: tuple[LayerBytes, ...]
    embedding: BlockStates
    head: BlockStates
    head_bytes: HeadBytes
    transients: Transients
    communication: Column

    def take(self, rows: NDArray[np.int64]) -> "BlockMemory":
        """Return the bytes of some layouts' blocks."""
        return take_rows(self, rows, len(self.communication))

    @property
    def head_transient(self) -> Column:
        """What head and loss add beside saved logits: at the loss, or at the head's backward."""
        logits, moving = self.head_bytes, self.transients
        at_work = np.maximum(logits.peak + moving.always, logits.gradient + moving.head)
        return np.maximum(at_work, moving.head_kept) - logits.saved


def block_memory(
    model: ModelSpec,
    job: TrainingJob,
    cluster: Cluster,
    table: LayoutTable,
    modules: tuple[str, ...] = (),
) -> BlockMemory:
    """Return the bytes of every block; layers that differ in their window only are one kind."""
    kinds = model.kinds_by_size
    states = tuple(layer_states(model, job, kind, table) for kind in kinds)
    activations = tuple(layer_bytes(model, job, kind, table, modules) for kind in kinds)
    embedding, head = embedding_states(model, job, table), head_states(model, job, table)
    return BlockMemory(
        kinds=kinds,
        layer_states=states,
        layer_bytes=activations,
        embedding=embedding,
        head=head,
        head_bytes=head_bytes(model, job, table),
        transients=transients(
            model,
            job,
            table,
            states=states,
            activations=activations,
            embedding=embedding,
            head=head,
        ),
        communication=communicator_bytes(model, job, cluster, table),
    )
