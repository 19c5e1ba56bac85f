"""Activations of final norm, head and loss on the last stage's rank."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodels.job import TrainingJob
from costmodels.layout_table import LayoutTable
from costmodels.memory.layer_parts import element_bytes, tokens_per_rank
from costmodels.model import ModelSpec
from costmodels.network.shard import padded_rows
from costmodels.targets import BEHAVIOURS, fuses_loss, works_on_whole_logits

Column = NDArray[np.float64]

CHUNKS_OF_LOSS = 8  # chosen: as torchtitan's and Liger's chunked losses split a sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadBytes:
    """Bytes of final norm, head and loss of one micro-batch on the last stage.

    Attributes:
        norm: Input and output of the final norm, until backward.
        saved: Logits that stay until backward.
        peak: Logits and their gradients at the worst moment of the loss, `saved` included.
        gradient: The gradient of the logits in the activations' format, while the head runs
            backward.
        waiting: The least of the logits per micro-batch in flight: `saved`, or `gradient` once a
            split backward has put off the head's weight gradient.

    """

    norm: Column
    saved: Column
    peak: Column
    gradient: Column
    waiting: Column


def head_bytes(model: ModelSpec, job: TrainingJob, table: LayoutTable) -> HeadBytes:
    """Return the bytes of final norm, head and loss.

    The vocabulary is cut over the tensor axis. A chunked loss holds one chunk of the logits, an
    eighth of a sequence, and nothing until backward but the gradient of the head's input.
    """
    behaviour = BEHAVIOURS[job.target]
    tokens = tokens_per_rank(job, table)
    shards = np.where(table.sequence_parallel == 1, table.tensor_parallel, 1)
    stream = element_bytes(job) * tokens * model.hidden_size / shards
    vocab_shards = 1 if works_on_whole_logits(job) else table.tensor_parallel
    vocab = padded_rows(model, job.target, table.tensor_parallel) / vocab_shards
    fused = fuses_loss(job)
    per_logit = np.full(
        len(table), behaviour.fused_logit_peak_bytes if fused else behaviour.logit_peak_bytes
    )
    if behaviour.uncut_logit_peak_bytes is not None:
        is_cut = table.tensor_parallel > 1
        per_logit = np.where(is_cut, per_logit, behaviour.uncut_logit_peak_bytes)
    chunk = 1 / CHUNKS_OF_LOSS if job.chunked_loss else 1.0
    saved = (0.0 if job.chunked_loss else behaviour.logit_saved_bytes) * tokens * vocab
    gradient = element_bytes(job) * tokens * vocab * chunk
    return HeadBytes(
        norm=(3 if job.chunked_loss else 2) * stream,
        saved=saved,
        peak=per_logit * tokens * vocab * chunk,
        gradient=gradient,
        waiting=np.where(table.puts_off, np.minimum(saved, gradient), saved),
    )
