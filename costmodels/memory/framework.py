"""What a GPU holds beside the allocator's tensors: context, communicators, fragmentation.

Communicators: NCCL keeps buffers per communicator and rank; two ranks need fewer channels than
more. NVIDIA/nccl#964 measured 544 MB for a group of two and 688 MB for larger ones on A100.

Fragmentation: a caching allocator hands out blocks of the sizes it once cut; what comes and goes
(activations, logits, gathered weights, gradients in flight) leaves holes, states do not:

    reserved = allocated + fraction * (allocated - states) + cached + communicators + context

Measured on eight B200 (SimuMax, public logs), reserved less allocated is 0.21-0.39 of what comes
and goes, 0.28 on average, with room to spare. Much of that is cache: when the driver refuses more
memory, the allocator gives free blocks back and tries again, so that a card near its limit shows
less (13B and 65B runs on A100 that completed, arXiv:2311.05610). The large flat buffers of an
optimizer step fit no block that activations left, so both are cached side by side: that is what
BLOOM's runs show (nvidia-smi, 1 to 24 replicas). Expandable segments map memory page by page and
leave next to none.
"""

from math import inf, isinf

import numpy as np
from numpy.typing import NDArray

from costmodels.hardware import Cluster
from costmodels.job import TrainingJob
from costmodels.layout_table import LayoutTable
from costmodels.model import ModelSpec
from costmodels.targets import BEHAVIOURS

Column = NDArray[np.float64]


def context_bytes(cluster: Cluster) -> float:
    """Return the bytes of the driver's context and loaded kernels on one GPU."""
    return cluster.profile.calibration["device_context_bytes"]


def communicator_bytes(
    model: ModelSpec, job: TrainingJob, cluster: Cluster, table: LayoutTable
) -> Column:
    """Return the bytes of all communicators of a rank.

    One per axis in use, one over data and context where both are, one between the first and the
    last stage where they share the embedding, and the target's own.
    """
    constants = cluster.profile.calibration
    pair, larger = constants["pair_communicator_bytes"], constants["communicator_bytes"]

    def group(size: NDArray[np.int64]) -> Column:
        return np.where(size > 1, np.where(size == 2, pair, larger), 0.0)  # noqa: PLR2004

    t = table
    both = np.where((t.data_parallel > 1) & (t.context_parallel > 1), 1, 0)
    shared_embedding = np.where((t.pipeline_parallel > 1) & model.tied_embeddings, 2, 1)
    total = (
        group(t.tensor_parallel)
        + group(t.pipeline_parallel)
        + group(t.data_parallel)
        + group(t.context_parallel)
        + group(t.expert_parallel)
        + group(both * t.data_parallel * t.context_parallel)
        + group(shared_embedding)
    )
    ranks = t.data_parallel * t.tensor_parallel * t.pipeline_parallel * t.context_parallel
    behaviour = BEHAVIOURS[job.target]
    messages = np.where(t.pipeline_parallel > 1, behaviour.message_groups * pair, 0.0)
    return total + messages + behaviour.extra_groups * group(ranks)


def fragmentation_fraction(job: TrainingJob, cluster: Cluster) -> float:
    """Return unused bytes per byte that comes and goes, which even a full card pays."""
    key = "expandable_fragmentation_fraction" if _expands(job) else "fragmentation_fraction"
    return cluster.profile.calibration[key]


def cached_bytes(
    job: TrainingJob, cluster: Cluster, coming_and_going: float, step: float, room: float
) -> float:
    """Return what the allocator keeps on top while there is room, and gives back when there is not.

    Args:
        job: Whose switches and target say whether segments expand.
        cluster: Its constants and capacity.
        coming_and_going: Bytes of activations, logits and transients.
        step: Bytes of the optimizer step's buffers, which no block of these can hold.
        room: Bytes that are left of the card.

    """
    if _expands(job):
        return 0.0
    constants = cluster.profile.calibration
    wanted = _cached_fraction(job, cluster) * coming_and_going + step
    return min(wanted, constants["cached_share_of_room"] * max(room, 0.0))


def growth(job: TrainingJob, cluster: Cluster, limit: float = inf) -> float:
    """Return reserved bytes per allocated byte that comes and goes, at least.

    Under a limit the cache counts too where it decides: what stays within the limit stays within
    it at this factor, though it may reserve less.

    Args:
        job: Its switches and target say whether segments expand.
        cluster: Its constants and capacity.
        limit: Bytes that a rank may reserve.

    """
    return 1 + fragmentation_fraction(job, cluster) + decisive_fraction(job, cluster, limit)


def growth_with_room(job: TrainingJob, cluster: Cluster) -> float:
    """Return what `growth` is on a card with room for all that the allocator would cache.

    A rank's fullest moment is the one that reserves most then, whatever room there is: only so
    does a bound of any moment at `growth` hold for what the fullest one reserves.
    """
    return 1 + fragmentation_fraction(job, cluster) + _cached_fraction(job, cluster)


def decisive_fraction(job: TrainingJob, cluster: Cluster, limit: float) -> float:
    """Return the cached fraction where it decides what stays within a limit, 0 where it may not.

    A card of U bytes reserves D + min(c C, s (U - D)) for a demand D of which C <= D come and go.
    Where s (U - D) is the smaller term, D stays within it only up to (limit - s U) / (1 - s).
    If all such demands stay within it with c D on top as well, what stays within it has
    D + c C <= limit; and that alone stays within it, where the step has no buffers of its own.
    """
    if _expands(job) or isinf(limit):
        return 0.0
    constants = cluster.profile.calibration
    fraction, share = _cached_fraction(job, cluster), constants["cached_share_of_room"]
    safe = limit - share * cluster.usable_memory  # times 1 - s
    return fraction if (1 + fraction) * safe <= (1 - share) * limit else 0.0


def _cached_fraction(job: TrainingJob, cluster: Cluster) -> float:
    return 0.0 if _expands(job) else cluster.profile.calibration["cached_fraction"]


def _expands(job: TrainingJob) -> bool:
    return job.switches.expandable_segments or BEHAVIOURS[job.target].expandable_segments
