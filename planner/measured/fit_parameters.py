"""Which constants a fit moves, and whose runs tell about them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from costmodels.profiles.reader import own_constants
from hardware_profiles import COMMON, generation_names

# Fitted elsewhere: constants of the memory model (costmodels/memory/framework.py).
OF_MEMORY = frozenset({"fragmentation_fraction", "cached_fraction"})
# The second constant scales along with the fitted first one: no run tells the two apart.
FOLLOWERS = {"attention_forward": "attention_backward"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A fitted constant: of one generation, or of all that have no value of their own."""

    generation: str
    name: str
    value: float
    low: float
    high: float

    @property
    def middle(self) -> float:
        """Where the constant stands if no run tells."""
        return math.sqrt(self.low * self.high)

    @property
    def width(self) -> float:
        """Standard deviation of its logarithm before any run: the bounds are two apart."""
        return math.log(self.high / self.low) / 4


def fitted_parameters(
    generations: Sequence[str], *, own_machine: bool = False
) -> tuple[Parameter, ...]:
    """Return every constant of kind "fitted" that bears on some generations, from their files.

    Args:
        generations: Whose runs there are.
        own_machine: Also constants that one of these generations has chosen by hand and others
            fit: the runs of one machine may tell what all runs together left open.

    """
    found = []
    for file in (COMMON, *sorted(generations)):
        kinds = {"fitted", "chosen"} if own_machine and file != COMMON else {"fitted"}
        for name, entry in own_constants(file).items():
            told = any(takes_from(generation, file, name) for generation in generations)
            # What is chosen may have no bounds, or 0 for one: no logarithm, no fit.
            bounded = entry.low and entry.high
            if told and bounded and entry.kind in kinds and name in _fitted_somewhere():
                found.append(
                    Parameter(
                        generation=file,
                        name=name,
                        value=float(entry.value),  # type: ignore[arg-type]  # checked by the reader
                        low=float(entry.low or 0),
                        high=float(entry.high or 0),
                    )
                )
    return tuple(found)


@lru_cache
def _fitted_somewhere() -> frozenset[str]:
    """Return the constants that some file marks as fitted, but for memory's and followers."""
    named = {
        name
        for file in (COMMON, *generation_names())
        for name, entry in own_constants(file).items()
        if entry.kind == "fitted"
    }
    return frozenset(named - OF_MEMORY - set(FOLLOWERS.values()))


def takes_from(generation: str, file: str, name: str) -> bool:
    """Return whether a generation takes a constant from a file: its own before the common one."""
    return file == (generation if name in _own_names(generation) else COMMON)


@lru_cache
def _own_names(generation: str) -> frozenset[str]:
    return frozenset(own_constants(generation))
