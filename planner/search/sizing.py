"""How many GPUs: the fewest that fit, and a sweep of counts.

Counts are every number up to one node, then whole nodes. The global batch is the job's at every
count where one is given; else it follows the count, so a job is asked for per count.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from costmodels.hardware import HardwareProfile, make_cluster
from costmodels.job import TrainingJob
from costmodels.model import ModelSpec
from planner.constraints import Constraints
from planner.search.nearest import first_fit
from planner.search.ranking import SearchResult, search, share_allowed

MOST_GPUS = 2**17  # chosen: the largest clusters that anybody trains on
JobOf = Callable[[int], TrainingJob]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """The answer at one count of GPUs."""

    num_gpus: int
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
    kept = tuple(
        n
        for n in sorted(counts)
        if low <= n <= high and (n <= gpus_per_node or n % gpus_per_node == 0)
    )
    if not kept:
        raise ValueError(f"--gpus {low}..{high} holds no whole number of {gpus_per_node}-GPU nodes")
    return kept


def fewest_gpus(
    model: ModelSpec,
    job_of: JobOf,
    profile: HardwareProfile,
    constraints: Constraints,
    *,
    gpus_per_node: int | None = None,
    low: int = 1,
    high: int = MOST_GPUS,
) -> int | None:
    """Return the smallest count on which some layout fits, None where none up to `high` does.

    Counts grow by doubling until one fits; then every count between the last that did not and that
    one is tried, so that odd counts of nodes are found.

    Args:
        model: The network.
        job_of: The job at a count of GPUs.
        profile: The machine.
        constraints: What the user fixed.
        gpus_per_node: Node size; the profile's by default.
        low: Smallest count of interest.
        high: Largest count of interest.

    """
    node = gpus_per_node or profile.gpus_per_node
    share = share_allowed(constraints)

    def fits(count: int) -> bool:
        cluster = make_cluster(profile, count, min(node, count))
        return first_fit(model, job_of(count), cluster, constraints, share) is not None

    tried = low - 1
    for count in _doubling(low, high, node):
        if fits(count):
            between = (n for n in range(tried + 1, count) if n <= node or n % node == 0)
            return next((n for n in between if fits(n)), count)
        tried = count
    return None


def sweep(
    model: ModelSpec,
    job_of: JobOf,
    profile: HardwareProfile,
    constraints: Constraints,
    *,
    counts: tuple[int, ...],
    gpus_per_node: int | None = None,
) -> tuple[Sized, ...]:
    """Return the best plan at each count of GPUs, ascending."""
    node = gpus_per_node or profile.gpus_per_node
    return tuple(
        Sized(
            num_gpus=count,
            result=search(
                model,
                job_of(count),
                make_cluster(profile, count, min(node, count)),
                constraints,
                top=1,
                only_fitting=True,
            ),
        )
        for count in counts
    )


def _doubling(low: int, high: int, node: int) -> Iterator[int]:
    count = low
    while count <= high:
        yield count
        count = count * 2 if count < node else max(count // node, 1) * 2 * node
        if node // 2 < count < node:
            count = node  # a node whose size is no power of two is tried as a whole
