"""What a fit makes small: the errors of runs, and of the differences between layouts of a grid.

With r = log(predicted / measured) of each run,

    loss = mean over families of mean huber(r) + ORDER * mean over grids of mean huber(r - mean r)

Families weigh the same however many runs they have: what matters is the next job, which belongs to
none. Inside a grid only the layout differs, so the mean error is no layout's fault, and what is
left of it decides which layout is ranked first.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

ORDER = 0.7  # chosen: the level of all families counts somewhat more than the order within grids
FEWEST_LAYOUTS = 5  # chosen: a grid of fewer runs says little about an order


class Weighed(Protocol):
    """A run as the loss sees it."""

    @property
    def family(self) -> str:
        """Runs of one campaign."""

    @property
    def grid(self) -> str:
        """Runs that differ in their layout only; "" for none."""


def family_weights(samples: Sequence[Weighed]) -> Array:
    """Return each sample's weight: families weigh the same, all together 1."""
    sizes = Counter(sample.family for sample in samples)
    return np.array([1 / (sizes[sample.family] * len(sizes)) for sample in samples])


def loss_terms(
    samples: Sequence[Weighed], errors: Array, slopes: Array
) -> tuple[Array, Array, Array]:
    """Return errors, slopes and weights of all terms of the loss: runs, then runs within grids.

    Args:
        samples: Measured runs.
        errors: log(predicted / measured) of each.
        slopes: Their derivatives, one row per sample.

    """
    members: dict[str, list[int]] = defaultdict(list)
    for place, sample in enumerate(samples):
        if sample.grid:
            members[sample.grid].append(place)
    grids = [places for places in members.values() if len(places) >= FEWEST_LAYOUTS]
    terms = [(errors, slopes, family_weights(samples))]
    for places in grids:
        within = errors[places] - errors[places].mean()
        steepness = slopes[places] - slopes[places].mean(axis=0)
        weight = ORDER / (len(grids) * len(places))
        terms.append((within, steepness, np.full(len(places), weight)))
    every = zip(*terms, strict=True)
    first, second, third = (np.concatenate(column) for column in every)
    return first, second, third
