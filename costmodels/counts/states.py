"""Bytes that travel in a step to keep a rank's states in step, in whole numbers.

How they travel follows the native runtime: gradients once per step under ZeRO-0 and 1, after each
backward under ZeRO-2 and 3; ZeRO-3 gathers each block for its forward and for its backward, or once
where it is kept. Padding travels too (`buckets.py`). Conventions are those of `ranks`.
"""

from collections import Counter

from costmodels.counts.buckets import Share, StateBucket, expert_ranks, state_buckets
from costmodels.job import TrainingJob
from costmodels.layout import Layout
from costmodels.memory.states import ZERO_2, ZERO_3
from costmodels.memory.weight_bytes import BytesPerWeight, bytes_per_weight
from costmodels.model import ModelSpec


def state_bytes(model: ModelSpec, job: TrainingJob, layout: Layout, rank: int) -> Counter[str]:
    """Count gradients and weights that travel to keep the states of a rank in step, by axis.

    Args:
        model: The network.
        job: What is trained per step.
        layout: How it is spread.
        rank: Position along the pipeline.

    """
    total: Counter[str] = Counter()
    per_weight = bytes_per_weight(job)
    for bucket in state_buckets(model, job, layout, rank):
        total["dp"] += _over_copies(bucket, per_weight, layout)
        if bucket.share is Share.SUMMED:
            total["tp"] += bucket.piece * per_weight.gradient
        if bucket.share is Share.TIED:
            total["pp"] += bucket.piece * per_weight.gradient
    return total


def _over_copies(bucket: StateBucket, per_weight: BytesPerWeight, layout: Layout) -> int:
    """Count what a bucket moves between the ranks that hold the same weights."""
    ways = layout.data_parallel * layout.context_parallel
    if bucket.share is Share.EXPERTS:
        ways, _ = expert_ranks(layout)
    is_cut = bucket.ranks > 1
    per_pass = layout.num_micro_batches if is_cut and layout.zero_stage >= ZERO_2 else 1
    total = bucket.padded * per_weight.gradient * per_pass if ways > 1 else 0
    if is_cut:
        if ways > bucket.ranks:
            total += bucket.piece * per_weight.gradient
        gathers = _gathers_per_step(layout)
        times = 2 if bucket.is_used_twice and gathers > 1 else 1
        total += bucket.padded * per_weight.working * gathers * times
    return total


def _gathers_per_step(layout: Layout) -> int:
    regathers = layout.zero_stage == ZERO_3 and not layout.keep_gathered
    return 2 * layout.num_micro_batches if regathers else 1
