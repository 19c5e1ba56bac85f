"""The flat buckets in which the native runtime moves a rank's states, in whole numbers of weights.

Weights of a stage share a bucket where they are treated alike: cut over the tensor axis, copied
along it with gradients that are summed (or not), tied to another stage, or routed experts. A bucket
is padded so that the ranks of its ZeRO group own equal pieces: groups of 3, 5, 6 or 7 move a few
weights more than the model has. Mirrors `runtime/states/packing.py`; verify holds one against the
other.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from costmodels.job import TrainingJob
from costmodels.layout import Layout, Offload
from costmodels.memory.states import ZERO_2
from costmodels.memory.weight_bytes import bytes_per_weight
from costmodels.model import LayerKind, ModelSpec
from costmodels.network.shard import padded_rows
from costmodels.parameters import head_parameters, layer_parameters
from costmodels.units import MIB

# Large enough that a link's latency does not show, small enough to hide behind a layer's backward.
# Kind: chosen; DDP's default is 25 MiB.
BUCKET_BYTES = 32 * MIB


class Share(IntEnum):
    """How ranks share weights besides their data axes; without a tensor axis all are COPIED."""

    CUT = 0  # over the tensor axis
    COPIED = 1
    SUMMED = 2  # copied, and gradients are summed over the tensor axis
    TIED = 3  # a table that another pipeline rank holds too; gradients are summed with it
    EXPERTS = 4  # over expert and expert-tensor axes


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBucket:
    """One bucket.

    Attributes:
        weights: Of one rank, without padding.
        ranks: ZeRO group that cuts its states; 1 where nothing is cut.
        is_used_twice: Holds a table that embeds and makes logits; ZeRO-3 gathers it for each.

    """

    share: Share
    weights: int
    ranks: int
    is_used_twice: bool = False

    @property
    def padded(self) -> int:
        """Weights that travel."""
        return self.weights + -self.weights % self.ranks

    @property
    def piece(self) -> int:
        """Weights of each rank of the group."""
        return self.padded // self.ranks


def state_buckets(
    model: ModelSpec, job: TrainingJob, layout: Layout, rank: int
) -> tuple[StateBucket, ...]:
    """Return the buckets of all stages of a pipeline rank."""
    found: list[StateBucket] = []
    for stage in layout.stages_of_rank(rank):
        found += _of_stage(model, job, layout, stage)
    return tuple(found)


def layers_of_stage(model: ModelSpec, layout: Layout, stage: int) -> tuple[LayerKind, ...]:
    """Return the kinds of a global stage's layers, in order."""
    first = sum(layout.layers_per_stage[:stage])
    return model.layer_kinds[first : first + layout.layers_per_stage[stage]]


def expert_ranks(layout: Layout) -> tuple[int, int]:
    """Return how many ranks hold the same experts, and how many of them cut their states."""
    shards = layout.expert_parallel * layout.expert_tensor_parallel
    ways = layout.data_parallel * layout.context_parallel * layout.tensor_parallel // shards
    return ways, max(layout.zero_group * layout.tensor_parallel // shards, 1)


def _of_stage(model: ModelSpec, job: TrainingJob, layout: Layout, stage: int) -> list[StateBucket]:
    """Fill buckets unit by unit: one set per unit, or up to a size where gradients stay whole."""
    is_cut = layout.zero_stage > 0
    _, of_experts = expert_ranks(layout)
    dense, experts = (group if is_cut else 1 for group in (layout.zero_group, of_experts))
    comes_and_goes = max(layout.zero_group, of_experts) > 1 or Offload.PARAMETERS in layout.offload
    per_unit = layout.zero_stage >= ZERO_2 and comes_and_goes
    limit = 0 if per_unit else BUCKET_BYTES
    width = bytes_per_weight(job).working
    table_share = _share(Share.CUT, layout)
    closed: list[StateBucket] = []
    opened: Counter[Share] = Counter()

    def close(share: Share, *, is_used_twice: bool = False) -> None:
        ranks = experts if share is Share.EXPERTS else dense
        weights = opened.pop(share)
        closed.append(
            StateBucket(share=share, weights=weights, ranks=ranks, is_used_twice=is_used_twice)
        )

    embeds_and_scores = model.tied_embeddings and _holds_both_ends(layout, stage)
    for place, unit in enumerate(_units(model, job, layout, stage)):
        opened.update(unit)
        for share in [share for share in opened if opened[share] * width >= limit]:
            used_twice = embeds_and_scores and place == 0 and share is table_share
            close(share, is_used_twice=used_twice)
    for share in list(opened):
        close(share)
    return closed


def _holds_both_ends(layout: Layout, stage: int) -> bool:
    """Whether a stage embeds, and its rank has the last stage too."""
    return stage == 0 and layout.rank_of_stage(layout.num_stages - 1) == layout.rank_of_stage(0)


def _units(
    model: ModelSpec, job: TrainingJob, layout: Layout, stage: int
) -> Sequence[Counter[Share]]:
    """Return the weights of embedding, layers and head of a stage by how they are shared.

    Copies over the tensor axis see other data under sequence parallelism (other tokens), norms of
    single heads always (other heads), so their gradients are summed.
    """
    tp = layout.tensor_parallel
    table = padded_rows(model, job.target, tp) // tp * model.hidden_size
    copied = Share.SUMMED if layout.sequence_parallel else Share.COPIED
    both_ends = _holds_both_ends(layout, 0)
    tied = Share.TIED if model.tied_embeddings and not both_ends else Share.CUT
    units: list[list[tuple[Share, int]]] = []
    if stage == 0:
        positions = model.num_position_embeddings * model.hidden_size
        units.append([(tied, table), (copied, positions)])
    units += [_of_layer(model, layout, kind) for kind in layers_of_stage(model, layout, stage)]
    if stage == layout.num_stages - 1:
        matrix = 0 if model.tied_embeddings else model.vocab_size * model.hidden_size
        own = 0 if model.tied_embeddings and both_ends else table
        units.append([(tied, own), (copied, head_parameters(model) - matrix)])
    return [_by_share(unit, layout) for unit in units]


def _of_layer(model: ModelSpec, layout: Layout, kind: LayerKind) -> list[tuple[Share, int]]:
    weights = layer_parameters(model, kind)
    tp = layout.tensor_parallel
    cut = weights.query_and_output_matrices + weights.ffn_matrices + weights.sharded_vectors
    key_value = weights.key_value_matrices // min(tp, model.num_kv_heads)
    shared = weights.replicated_vectors + weights.latent_matrices + weights.router
    summed = shared
    if not layout.sequence_parallel:
        summed = 2 * model.head_dim if model.qk_norm == "per-head" else 0
        if model.moe and weights.router:
            summed += model.hidden_size * model.moe.num_experts
    shards = layout.expert_parallel * layout.expert_tensor_parallel
    return [
        (Share.CUT, cut // tp + key_value),
        (Share.SUMMED, summed),
        (Share.COPIED, shared - summed),
        (Share.EXPERTS, weights.expert_parameters // shards),
    ]


def _by_share(unit: Sequence[tuple[Share, int]], layout: Layout) -> Counter[Share]:
    total: Counter[Share] = Counter()
    for share, weights in unit:
        if weights:
            total[_share(share, layout)] += weights
    return total


def _share(share: Share, layout: Layout) -> Share:
    if layout.tensor_parallel == 1 and share in (Share.CUT, Share.SUMMED):
        return Share.COPIED
    return share
