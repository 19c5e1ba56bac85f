"""Legality as data: a rule is a vectorised predicate, a sentence and the fields at fault.

    holds(case) -> one boolean per layout of the table

One layout is a table of one row, so `estimate` and `search` read the same source. `says` is a
template over the names of `facts`; every number in it says where it came from.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from costmodels.hardware import Cluster
from costmodels.job import Precision, Target, TrainingJob
from costmodels.layout import Layout
from costmodels.layout_table import SCHEDULES, IntColumn, LayoutTable
from costmodels.model import ModelSpec

Mask = NDArray[np.bool_]

# Stages of ZeRO by what they cut first (arXiv:1910.02054, section 3).
CUTS_GRADIENTS = 2
CUTS_PARAMETERS = 3

# Numbers that share a scale, or that a kernel reads at once, in low precision.
WIDTH_BLOCKS = {Precision.FP8: 16, Precision.MXFP8: 32, Precision.NVFP4: 16}
# Runtimes whose fp8 products are Transformer Engine's, which asks for rows in eights alone
# (transformer_engine/pytorch/utils.py, assert_dim_for_fp8_exec).
_TRANSFORMER_ENGINE = (Target.MEGATRON, Target.ACCELERATE)

Fact = int | float | str | bool | tuple[int, ...] | tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a rule looks at: many layouts of one job on one cluster."""

    model: ModelSpec
    job: TrainingJob
    cluster: Cluster
    table: LayoutTable

    @property
    def splits_sequence_by_tensor(self) -> Mask:
        """Sequence parallelism is on; at tensor parallel 1 there is nothing to split."""
        return (self.table.sequence_parallel > 0) & (self.table.tensor_parallel > 1)

    @property
    def num_stages(self) -> IntColumn:
        """Global pipeline stages, virtual ones counted."""
        return self.table.pipeline_parallel * self.table.stages_per_rank

    @property
    def stage_ranks(self) -> IntColumn:
        """Ranks inside one pipeline rank, over which experts fold: dp * cp * tp."""
        return self.table.data_parallel * self.table.context_parallel * self.table.tensor_parallel

    def uses(self, *schedules: str) -> Mask:
        """Rows with one of these schedules."""
        codes = [code for code, schedule in enumerate(SCHEDULES) if schedule in schedules]
        return np.isin(self.table.schedule, codes)

    def always(self, *, holds: bool) -> Mask:
        """One answer for every row."""
        return np.full(len(self.table), holds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that a runtime demands of a layout.

    Attributes:
        name: What counts and messages call it.
        reads: Columns of the table that `holds` looks at; the space applies a rule as soon as
            these are known.
        holds: Rows that obey.
        says: Template of the message for one layout that does not.
        given: Facts shown with a violation.
        blames: Fields whose legal values are offered.

    """

    name: str
    reads: tuple[str, ...]
    holds: Callable[[Case], Mask]
    says: str
    given: tuple[str, ...]
    blames: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A rule that a layout breaks.

    Attributes:
        given: The numbers of both sides.
        allowed: Per field at fault, the values legal for this job on these GPUs with everything
            else fixed and data_parallel derived again.

    """

    rule: str
    message: str
    given: Mapping[str, Fact]
    allowed: Mapping[str, Sequence[Fact]]


def facts(model: ModelSpec, job: TrainingJob, cluster: Cluster, layout: Layout) -> dict[str, Fact]:
    """Return every number that a message may name, for one layout."""
    plain: dict[str, Fact] = {f.name: getattr(layout, f.name) for f in fields(layout)}
    moe = model.moe
    return plain | {
        "schedule": layout.schedule.value,
        "recompute": layout.recompute.value,
        "context_parallel_type": layout.context_parallel_type.value,
        "offload": ",".join(layout.offload) or "none",
        "model": model.name,
        "hidden_size": model.hidden_size,
        "num_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_kv_heads": model.num_kv_heads,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_experts": moe.num_experts if moe else 0,
        "expert_ffn_hidden_size": moe.ffn_hidden_size if moe else 0,
        "seq_len": job.seq_len,
        "global_batch_size": job.global_batch_size,
        "precision": job.precision.value,
        "target": job.target.value,
        "hardware": cluster.profile.name,
        "gpus": cluster.num_gpus,
        "gpus_per_node": cluster.gpus_per_node,
        "degree_product": layout.num_gpus,
        "num_stages": layout.num_stages,
        "layout_batch": layout.global_batch_size,
        "model_batch": layout.micro_batch_size * layout.data_parallel,
        "stage_ranks": layout.data_parallel * layout.context_parallel * layout.tensor_parallel,
        "expert_ranks": layout.expert_parallel * layout.expert_tensor_parallel,
        "zero_ranks": layout.data_parallel * layout.context_parallel,
        "partition_layers": sum(layout.layers_per_stage),
        "partition_stages": len(layout.layers_per_stage),
        "sequence_multiple": sequence_multiple(layout),
        "rank_tokens": layout.micro_batch_size * job.seq_len // layout.context_parallel,
        "token_block": token_block(job),
        "width_block": WIDTH_BLOCKS.get(job.precision, 1),
    }


def token_block(job: TrainingJob) -> int:
    """Tokens of a micro-batch on a rank come in multiples of this; 1 in 16 bits."""
    by_engine = job.precision is Precision.FP8 and job.target in _TRANSFORMER_ENGINE
    return 8 if by_engine else WIDTH_BLOCKS.get(job.precision, 1)


def sequence_multiple(layout: Layout) -> int:
    """Tokens that the sequence must be a multiple of (see `sequence_divides` in common)."""
    splits = layout.sequence_parallel and layout.tensor_parallel > 1
    halves = 2 if layout.context_parallel > 1 and layout.context_parallel_type != "ulysses" else 1
    return halves * layout.context_parallel * (layout.tensor_parallel if splits else 1)
