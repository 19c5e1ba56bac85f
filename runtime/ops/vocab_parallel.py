"""Embedding and loss over a vocabulary whose rows are cut over the ranks of an axis.

Functions for graphs, as those of `collectives`: each knows its own backward.
"""

# ruff: noqa: ANN401, PLR0917  (autograd contexts take any attribute; graphs pass by position)

import math
from typing import Any

import torch
from torch import Tensor

from runtime.communication.collectives import all_reduce
from runtime.communication.mesh import Group, Mesh


def vocab_parallel_embedding(weight: Tensor, ids: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """Look up the tokens whose rows this rank holds; the others are zero.

    The result is partial: it must be summed over the axis (`reduce_from`, `reduce_scatter`).

    Args:
        weight: [V / axis, H], this rank's rows of the (padded) vocabulary.
        ids: Tokens of any shape.
        mesh: Where this rank stands.
        axis: Axis that the vocabulary is cut over.

    """
    rows, outside = _local_rows(ids, weight.shape[0], mesh.coordinate(axis))
    found = torch.nn.functional.embedding(rows, weight)
    return found.masked_fill(outside.unsqueeze(-1), 0.0)


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, mesh: Mesh, axis: str, vocab_size: int, ignore_index: int
) -> Tensor:
    """Return the summed cross entropy of logits whose vocabulary is cut over an axis.

    The logits are never gathered: ranks exchange each token's maximum, then its sum of
    exponentials and its label's logit (Megatron-LM, arXiv:1909.08053, section 3).

    Args:
        logits: [tokens, V / axis], V padded to a multiple of the axis.
        labels: [tokens].
        mesh: Where this rank stands.
        axis: Axis that the vocabulary is cut over.
        vocab_size: Vocabulary without padding; columns beyond it never count.
        ignore_index: Label of tokens that do not count.

    """
    group = mesh.group(axis)
    first = group.index * logits.shape[-1]
    loss = _VocabParallelCrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, labels, group, vocab_size - first, ignore_index
    )
    assert isinstance(loss, Tensor)
    return loss


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Forward keeps the probabilities; backward is probabilities minus the label's one."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, group: Group, num_columns: int, ignore_index: int
    ) -> Tensor:
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        own = scores[:, : max(num_columns, 0)]  # padding does not count
        highest = own.amax(-1) if own.shape[-1] else scores.new_full(scores.shape[:-1], -math.inf)
        largest = all_reduce(highest, group, "max")
        exponentials = (scores - largest.unsqueeze(-1)).exp_()
        exponentials[:, own.shape[-1] :] = 0.0
        columns, outside = _local_rows(labels, scores.shape[-1], group.index)
        chosen = scores.gather(-1, columns.unsqueeze(-1)).squeeze(-1) - largest
        sums = torch.stack((exponentials.sum(-1), chosen.masked_fill(outside, 0.0)))
        total, label_score = all_reduce(sums, group)
        counts = labels != ignore_index
        probabilities = exponentials.div_(total.unsqueeze(-1))
        ctx.save_for_backward(probabilities, columns, outside, counts)
        ctx.dtype = logits.dtype
        losses: Tensor = (total.log() - label_score) * counts
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, columns, outside, counts = ctx.saved_tensors
        scale = (gradient * counts).unsqueeze(-1).to(probabilities.dtype)
        result = probabilities * scale
        result.scatter_add_(-1, columns.unsqueeze(-1), -scale * ~outside.unsqueeze(-1))
        return result.to(ctx.dtype), None, None, None, None


def _local_rows(ids: Tensor, num_rows: int, index: int) -> tuple[Tensor, Tensor]:
    """Return each id's row on this rank (0 where another rank holds it) and which those are."""
    rows = ids - index * num_rows
    outside = (rows < 0) | (rows >= num_rows)
    return rows.masked_fill(outside, 0), outside
