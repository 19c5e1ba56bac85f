"""Shard: what one rank sees of a micro-batch: the degrees that decide the shapes of its ops.

Held as Python integers for one layout (exact counts) or as int64 columns for many. Layouts that
share a shard share the cost of every block: the table of distinct shards is far shorter than the
table of layouts.
"""

from dataclasses import dataclass

from costmodels.job import Target, TrainingJob
from costmodels.layout import ContextParallelType, Layout
from costmodels.layout_table import CONTEXT_PARALLEL_TYPES, LayoutTable
from costmodels.model import ModelSpec
from costmodels.network.ops import Size
from costmodels.targets import BEHAVIOURS


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Degrees and sizes of one rank's share of a micro-batch.

    Attributes:
        sequence_parallel: 1 where activations between tensor-parallel regions are cut by tokens.
        ring: 1 where attention passes keys and values around the context axis.
        ulysses: 1 where attention exchanges heads for tokens over the context axis.

    """

    tensor_parallel: Size
    context_parallel: Size
    expert_parallel: Size
    expert_tensor_parallel: Size
    micro_batch_size: Size
    sequence_parallel: Size
    ring: Size
    ulysses: Size
    seq_len: int

    @property
    def tokens(self) -> Size:
        """Tokens of a micro-batch inside tensor-parallel regions."""
        return self.micro_batch_size * self.seq_len // self.context_parallel

    @property
    def outer_tokens(self) -> Size:
        """Tokens between tensor-parallel regions."""
        split = 1 + (self.tensor_parallel - 1) * self.sequence_parallel
        return self.tokens // split

    @property
    def routed_tokens(self) -> Size:
        """Tokens that a rank routes to experts: its own part, tensor ranks never send twice."""
        return self.tokens // self.tensor_parallel


def shard_of(layout: Layout, job: TrainingJob) -> Shard:
    """Return the shard of one layout, in exact integers."""
    kind = layout.context_parallel_type
    return Shard(
        tensor_parallel=layout.tensor_parallel,
        context_parallel=layout.context_parallel,
        expert_parallel=layout.expert_parallel,
        expert_tensor_parallel=layout.expert_tensor_parallel,
        micro_batch_size=layout.micro_batch_size,
        sequence_parallel=int(layout.sequence_parallel),
        ring=int(kind is ContextParallelType.RING),
        ulysses=int(kind is ContextParallelType.ULYSSES),
        seq_len=job.seq_len,
    )


def shards_of(table: LayoutTable, job: TrainingJob) -> Shard:
    """Return the shards of a table's layouts, in columns."""
    ring = CONTEXT_PARALLEL_TYPES.index(ContextParallelType.RING)
    ulysses = CONTEXT_PARALLEL_TYPES.index(ContextParallelType.ULYSSES)
    return Shard(
        tensor_parallel=table.tensor_parallel,
        context_parallel=table.context_parallel,
        expert_parallel=table.expert_parallel,
        expert_tensor_parallel=table.expert_tensor_parallel,
        micro_batch_size=table.micro_batch_size,
        sequence_parallel=table.sequence_parallel,
        ring=(table.context_parallel_type == ring).astype("int64"),
        ulysses=(table.context_parallel_type == ulysses).astype("int64"),
        seq_len=job.seq_len,
    )


def padded_rows(model: ModelSpec, target: Target, tensor_parallel: Size) -> Size:
    """Return the rows of the embedding after the target's padding, over all tensor ranks."""
    multiple = BEHAVIOURS[target].vocab_multiple * tensor_parallel
    return -(-model.vocab_size // multiple) * multiple


def per_rank(whole: int, degree: Size) -> Size:
    """Return the larger share of `whole` things cut over `degree` ranks, at least one."""
    return -(-whole // degree)
