"""Which tokens of a sequence a rank of the context axis holds.

    ring, all-gather   2 n chunks, rank r has chunks r and 2 n - 1 - r: an early one, which sees
                       little, and a late one, which sees much, so that causal work is even
    ulysses            n runs of tokens in order: attention sees the whole sequence on every rank

Tokens, labels and positions are cut alike; everything between attention layers works on tokens
alone.
"""

import torch
from torch import Tensor

from costmodels.layout import ContextParallelType, Layout
from runtime.program import Batch


def context_positions(seq_len: int, layout: Layout, rank: int) -> Tensor:
    """Return the places in the sequence that a context rank holds, in its own order.

    Args:
        seq_len: Tokens of a whole sequence.
        layout: Degree and kind of the context axis.
        rank: Place on the axis.

    Raises:
        ValueError: The sequence does not cut into equal shares.

    """
    size = layout.context_parallel
    is_paired = layout.context_parallel_type is not ContextParallelType.ULYSSES and size > 1
    num_chunks = 2 * size if is_paired else size
    if seq_len % num_chunks:
        raise ValueError(
            f"a sequence of {seq_len} tokens does not cut into the {num_chunks} equal chunks of "
            f"context parallel {size} ({layout.context_parallel_type})"
        )
    chunks = torch.arange(seq_len).chunk(num_chunks)
    return torch.cat((chunks[rank], chunks[-1 - rank])) if is_paired else chunks[rank]


def context_share(batch: Batch, layout: Layout, rank: int) -> dict[str, Tensor]:
    """Return a context rank's tokens and labels of whole sequences, and their positions.

    Args:
        batch: Fields [b, seq_len].
        layout: Degree and kind of the context axis.
        rank: Place on the axis.

    """
    ids = batch["input_ids"]
    if layout.context_parallel == 1:
        return dict(batch)
    places = context_positions(ids.shape[1], layout, rank).to(ids.device)
    share = {name: field.index_select(1, places) for name, field in batch.items()}
    share.setdefault("position_ids", places.expand(ids.shape[0], -1))
    return share
