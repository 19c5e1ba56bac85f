"""Layout flags as `search` takes them: constraints, where a comma list means any of them.

Counts also take ranges: `--tp 1..8` is every count from 1 to 8, `--tp 1,2,8..16` works too.
"""

import argparse
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from costmodels.layout import ContextParallelType, Offload, Recompute, Schedule
from planner.cli.flags import DEGREES
from planner.cli.values import counts, offloads, positive
from planner.meanings import MEANINGS

if TYPE_CHECKING:
    from planner.constraints import Constraints

E = TypeVar("E", bound=StrEnum)

MOST_VALUES = 4096  # chosen: a longer range is a mistake


def add_constraint_flags(parser: ArgumentParser) -> None:
    """Add the flags that narrow the space; an axis that is left out is free."""
    group = parser.add_argument_group(
        "constraints", "an axis that is left out is free; lists mean any of them (1,2,8 or 1..8)"
    )
    for name, long, short in DEGREES:
        group.add_argument(
            short, long, dest=name, type=count_choices, metavar="N,N..N", help=MEANINGS[name]
        )
    group.add_argument(
        "--zero",
        type=zero_choices,
        dest="zero_stage",
        metavar="0..3",
        help=MEANINGS["zero_stage"],
    )
    group.add_argument(
        "--zero-group", type=count_choices, metavar="RANKS", help=MEANINGS["zero_group"]
    )
    group.add_argument(
        "--keep-gathered", action=argparse.BooleanOptionalAction, help=MEANINGS["keep_gathered"]
    )
    _add_choice_flags(group)
    group.add_argument(
        "--max-memory-fraction",
        type=_share,
        metavar="SHARE",
        help="of the usable memory that may fill",
    )
    group.add_argument("--allow-at-risk", action="store_true", help="list what may die, too")
    group.add_argument(
        "--tokens-per-expert", type=positive, metavar="N", help="at least so many per micro-batch"
    )


def _add_choice_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags of choices: schedule, recomputation, sequence and context axis, offload."""
    group.add_argument(
        "--schedule", type=member_choices(Schedule), metavar="NAME,...", help=_named(Schedule)
    )
    group.add_argument(
        "--recompute", type=member_choices(Recompute), metavar="NAME,...", help=_named(Recompute)
    )
    group.add_argument(
        "--recompute-layers", type=positive, metavar="N", help=MEANINGS["recompute_layers"]
    )
    group.add_argument(
        "--sequence-parallel",
        action=argparse.BooleanOptionalAction,
        help=MEANINGS["sequence_parallel"],
    )
    group.add_argument(
        "--cp-type",
        type=member_choices(ContextParallelType),
        metavar="NAME,...",
        help=_named(ContextParallelType),
    )
    group.add_argument(
        "--offload",
        type=offload_choices,
        metavar="PARTS,...",
        help=f"{MEANINGS['offload']}: none or parts; + combines two (optimizer+activations)",
    )
    group.add_argument(
        "--layers-per-stage", type=counts, metavar="N,N,...", help=MEANINGS["layers_per_stage"]
    )


def read_constraints(arguments: Namespace) -> "Constraints":
    """Return the constraints that the flags describe."""
    from planner.constraints import Constraints

    sequence, kept = arguments.sequence_parallel, arguments.keep_gathered
    return Constraints(
        **{name: getattr(arguments, name) for name, _, _ in DEGREES},
        zero_stage=arguments.zero_stage,
        zero_group=arguments.zero_group,
        keep_gathered=None if kept is None else (kept,),
        schedule=arguments.schedule,
        recompute=arguments.recompute,
        recompute_layers=arguments.recompute_layers,
        sequence_parallel=None if sequence is None else (sequence,),
        context_parallel_type=arguments.cp_type,
        offload=arguments.offload,
        layers_per_stage=arguments.layers_per_stage,
        max_memory_fraction=arguments.max_memory_fraction,
        allow_at_risk=arguments.allow_at_risk,
        min_tokens_per_expert=arguments.tokens_per_expert,
    )


def count_choices(text: str) -> tuple[int, ...]:
    """Read counts and ranges of counts (an argparse type)."""
    return _numbers(text, positive)


def zero_choices(text: str) -> tuple[int, ...]:
    """Read ZeRO stages (an argparse type)."""
    return _numbers(text, _zero_stage)


def member_choices(kind: type[E]) -> Callable[[str], tuple[E, ...]]:
    """Return a reader of names of an enumeration (an argparse type)."""

    def read(text: str) -> tuple[E, ...]:
        known = [member.value for member in kind]
        wrong = [name for name in text.split(",") if name not in known]
        if wrong:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of {', '.join(known)}")
        return tuple(dict.fromkeys(kind(name) for name in text.split(",")))

    return read


def offload_choices(text: str) -> tuple[tuple[Offload, ...], ...]:
    """Read combinations of offloaded parts (an argparse type)."""
    combinations = [offloads(word.replace("+", ",")) for word in text.split(",")]
    return tuple(dict.fromkeys(combinations))


def _named(kind: type[StrEnum]) -> str:
    return "any of " + ", ".join(kind)


def _numbers(text: str, read: Callable[[str], int]) -> tuple[int, ...]:
    found: list[int] = []
    for word in text.split(","):
        low, dots, high = word.partition("..")
        first = read(low)
        last = read(high) if dots else first
        if last < first:
            raise argparse.ArgumentTypeError(f"{word}: a range goes from low to high")
        if last - first >= MOST_VALUES:
            raise argparse.ArgumentTypeError(f"{word}: more than {MOST_VALUES} values")
        found += range(first, last + 1)
    return tuple(dict.fromkeys(found))


def _zero_stage(text: str) -> int:
    if text not in ("0", "1", "2", "3"):
        raise argparse.ArgumentTypeError(f"{text!r} is none of 0, 1, 2, 3")
    return int(text)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} does not lie in (0, 1]")
    return value
