"""Values of flags: argparse types that say what is wrong with a text.

Only argparse and plain enumerations are imported at module level, so that `--help` stays fast.
"""

import argparse
import re

from costmodels.config_keys import MAX_COUNT
from costmodels.layout import AXES, Offload

MOST_DIGITS = 100  # chosen: no count has as many
MAX_TAKEN_GIB = 2**20  # chosen: beyond any card


def positive(text: str) -> int:
    """Read a count of at least one (an argparse type)."""
    if not re.fullmatch(r"[+-]?[0-9]+", text):  # int() takes 8_0 for 80, and digits of any script
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    value = int(text) if len(text) <= MOST_DIGITS else MAX_COUNT + 1
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    if value > MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{text} is more than {MAX_COUNT}")
    return value


def offloads(text: str) -> tuple[Offload, ...]:
    """Read `none` or a comma list of what goes to the host (an argparse type)."""
    if text == "none":
        return ()
    names = text.split(",")
    known = [part.value for part in Offload]
    wrong = [name for name in names if name not in known]
    if wrong:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of none, {', '.join(known)}")
    chosen = {Offload(name) for name in names}
    if Offload.PARAMETERS in chosen:  # parameters imply the optimizer
        chosen.add(Offload.OPTIMIZER)
    return tuple(part for part in Offload if part in chosen)


def rank_order(text: str) -> tuple[str, ...]:
    """Read an order of the axes (an argparse type)."""
    order = tuple(text.split(","))
    if sorted(order) != sorted(AXES):
        raise argparse.ArgumentTypeError(f"{text!r} does not hold each of {', '.join(AXES)} once")
    return order


def counts(text: str) -> tuple[int, ...]:
    """Read a comma list of counts (an argparse type)."""
    return tuple(positive(part) for part in text.split(","))


def read_gpus(text: str) -> int | range | None:
    """Read --gpus of a search: a count, a range "8..1024" (both ends included), None for auto.

    Raises:
        ValueError: It is none of these.

    """
    if text == "auto":
        return None
    low, dots, high = text.partition("..")
    try:
        return range(positive(low), positive(high)) if dots else positive(text)
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"--gpus: {error} (a count, auto, or a range 8..1024)") from None


def gibibytes(text: str) -> float:
    """Read a size in GiB (an argparse type)."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GiB") from None
    if not 0 <= value <= MAX_TAKEN_GIB:
        raise argparse.ArgumentTypeError(f"{text} does not lie between 0 and {MAX_TAKEN_GIB} GiB")
    return value
