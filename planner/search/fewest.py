"""The fewest GPUs on which some layout fits, and the layout that shows it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from costmodels.hardware import Cluster, HardwareProfile, make_cluster
from costmodels.job import TrainingJob
from costmodels.layout import Layout
from costmodels.model import ModelSpec
from planner.constraints import Constraints
from planner.search.costs import ModelCosts
from planner.search.explore import explore
from planner.search.space import space_of
from planner.search.workers import mapped

MOST_GPUS = 2**17  # chosen: the largest clusters that anybody trains on
MOST_TRIED = 32  # chosen: counts tried one by one, a second each
JobOf = Callable[[int], TrainingJob]
Question = tuple[ModelSpec, TrainingJob, Cluster, Constraints, float]  # arguments of first_fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Fewest:
    """A count of GPUs, and a layout that fits them; no smaller count that was tried fits one."""

    num_gpus: int
    layout: Layout


def fewest_gpus(
    model: ModelSpec,
    job_of: JobOf,
    profile: HardwareProfile,
    constraints: Constraints,
    *,
    share: float,
    node: int,
    low: int = 1,
    high: int = MOST_GPUS,
    workers: int = 1,
) -> Fewest | None:
    """Return the smallest count on which some layout fits, None where none up to `high` does.

    Counts grow by doubling until one fits; then every count between the last that did not and that
    one is tried, so that odd counts of nodes are found. Where more than `MOST_TRIED` lie between,
    halving narrows them first, as if more nodes never fitted less.

    Args:
        model: The network.
        job_of: The job at a count of GPUs.
        profile: The machine.
        constraints: What the user fixed.
        share: Share of a device's usable memory that may be reserved.
        node: GPUs of a node; counts above are whole nodes.
        low: Smallest count of interest.
        high: Largest count of interest.
        workers: Processes that try counts side by side.

    """

    def question(count: int) -> Question:
        return model, job_of(count), make_cluster(profile, count, node), constraints, share

    last = low - 1
    for count in _doubling(low, high, node):
        layout = first_fit(*question(count))
        if layout is None:
            last = count
            continue
        found = Fewest(num_gpus=count, layout=layout)
        between = [n for n in range(last + 1, count) if is_whole(n, node)]
        while len(between) > MOST_TRIED:
            middle = len(between) // 2
            layout = first_fit(*question(between[middle]))
            if layout is not None:
                found = Fewest(num_gpus=between[middle], layout=layout)
            between = between[middle + 1 :] if layout is None else between[:middle]
        answers = mapped(first_fit, map(question, between), workers)
        smaller = (
            Fewest(num_gpus=n, layout=a)
            for n, a in zip(between, answers, strict=True)
            if a is not None
        )
        return next(smaller, found)
    return None


def first_fit(
    model: ModelSpec,
    job: TrainingJob,
    cluster: Cluster,
    constraints: Constraints,
    share: float,
) -> Layout | None:
    """Return some layout that fits, in the order of the bound; None where none does."""
    space = space_of(model, job, cluster, constraints)
    costs = ModelCosts.under(model, job, cluster, constraints)
    found = explore(space, costs, constraints, share, 1, stop_at_first=True)
    return found.incumbents[0].layout if found.incumbents else None


def is_whole(count: int, node: int) -> bool:
    """Whether a count of GPUs lies within one node of that size, or makes whole nodes."""
    return count <= node or count % node == 0


def _doubling(low: int, high: int, node: int) -> Iterator[int]:
    """Yield counts that grow by doubling, within a node and by whole nodes above; the last too."""
    count = low if low <= node else -(-low // node) * node
    last = high if high <= node else high // node * node
    while count < last:
        yield count
        if count >= node:
            count *= 2
        else:  # a node whose size is no power of two is tried as a whole
            count = 2 * count if 2 * count <= node // 2 else node
    if low <= last:
        yield last
