"""A sweep of counts of GPUs.

Counts are every number up to one node, then whole nodes. The global batch is the job's at every
count where one is given; else it follows the count, so a job is asked for per count.
"""

from dataclasses import dataclass

from costmodels.hardware import Cluster, HardwareProfile, make_cluster
from costmodels.job import TrainingJob
from costmodels.model import ModelSpec
from planner.constraints import Constraints
from planner.search.fewest import MOST_GPUS, JobOf, is_whole
from planner.search.ranking import SearchResult, search
from planner.search.workers import mapped


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """The answer at one count of GPUs."""

    job: TrainingJob
    cluster: Cluster
    result: SearchResult


def counts_between(low: int, high: int, gpus_per_node: int) -> tuple[int, ...]:
    """Return counts from low to high: powers of two times a node above one node, and both ends.

    Raises:
        ValueError: The range is empty, or holds no count of whole nodes.

    """
    if low > high:
        raise ValueError(f"--gpus {low}..{high}: a range goes from low to high")
    if high > MOST_GPUS:
        raise ValueError(f"--gpus {low}..{high}: a range goes up to {MOST_GPUS} GPUs")
    counts = {low, high}
    doubling = 1
    while doubling <= high:
        counts |= {doubling, doubling * gpus_per_node}
        doubling *= 2
    kept = tuple(n for n in sorted(counts) if low <= n <= high and is_whole(n, gpus_per_node))
    if not kept:
        raise ValueError(f"--gpus {low}..{high} holds no whole number of {gpus_per_node}-GPU nodes")
    return kept


def counts_around(gpus: int, gpus_per_node: int) -> tuple[int, ...]:
    """Return half, twice and four times a count of GPUs, where these are whole nodes."""
    near = (*([] if gpus % 2 else [gpus // 2]), 2 * gpus, 4 * gpus)
    return tuple(n for n in near if n <= MOST_GPUS and is_whole(n, gpus_per_node))


def sweep(
    model: ModelSpec,
    job_of: JobOf,
    profile: HardwareProfile,
    constraints: Constraints,
    *,
    counts: tuple[int, ...],
    node: int,
    workers: int = 1,
) -> tuple[Sized, ...]:
    """Return the best plan at each count of GPUs, ascending.

    Args:
        model: The network.
        job_of: The job at a count of GPUs.
        profile: The machine.
        constraints: What the user fixed.
        counts: Counts of GPUs.
        node: GPUs of a node; counts above are whole nodes.
        workers: Processes that search counts side by side.

    """
    questions = (
        (model, job_of(count), make_cluster(profile, count, node), constraints) for count in counts
    )
    return tuple(mapped(_sized, questions, workers))


def _sized(model: ModelSpec, job: TrainingJob, cluster: Cluster, constraints: Constraints) -> Sized:
    result = search(model, job, cluster, constraints, top=1, only_fitting=True)
    return Sized(job=job, cluster=cluster, result=result)
