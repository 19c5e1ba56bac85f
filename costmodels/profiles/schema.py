"""The keys of a hardware profile: what each is, its unit in the file, and how values are checked.

A profile is handled flat, one `Entry` per dotted key ("links.inter_node.gb_per_s"), so that a file
and `--set KEY=VALUE` pass the same checks. A number in a file is bare, or a table that says where
it comes from:

    memory_gib = 80
    memory_gib = { value = 80, kind = "datasheet", source = "...", low = 79, high = 80 }

Numbers stay decimals until they are scaled to SI, so that reading what was written is exact.
"""

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum

from costmodels.units import GB, GIB, TFLOP

PRECISIONS = ("bf16", "fp16", "fp32", "tf32", "fp8", "mxfp8", "nvfp4")
STATED = "stated"  # by the user, in a file or with --set, without more
SOURCE_KINDS = ("datasheet", "measured", "fitted", "chosen", STATED)
MICROSECOND = Decimal("1e-6")
ONE = Decimal(1)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,79}")
_TEXT = re.compile(r"[^\x00-\x1f\x7f]{1,200}")
_ENTRY_KEYS = frozenset({"value", "kind", "source", "low", "high"})


class ValueType(Enum):
    """What a key holds, in the words of messages."""

    NUMBER = "a positive finite number"
    CONSTANT = "a finite number of at least 0"
    COUNT = "a whole number above 0"
    FLAG = "true or false"
    NAME = "a short name of letters, digits and . _ + -"
    TEXT = "one line of text"


TEXTS = frozenset({ValueType.NAME, ValueType.TEXT})  # neither has a unit, a source or --set


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key: its type, the factor from the file's unit to SI, and whether it must stand."""

    type: ValueType
    scale: Decimal = ONE
    required: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One value as the file has it, with its source; `source` is text, never a short name."""

    value: object
    kind: str = STATED
    source: str = ""
    low: Decimal | None = None
    high: Decimal | None = None


_LINK = {
    "kind": Key(type=ValueType.NAME),
    "gb_per_s": Key(type=ValueType.NUMBER, scale=Decimal(GB)),
    "latency_us": Key(type=ValueType.NUMBER, scale=MICROSECOND),
}
MACHINE_KEYS: Mapping[str, Key] = {
    "name": Key(type=ValueType.NAME),
    "generation": Key(type=ValueType.NAME),
    "device.name": Key(type=ValueType.TEXT),
    "device.memory_gib": Key(type=ValueType.NUMBER, scale=Decimal(GIB)),
    "device.usable_fraction": Key(type=ValueType.NUMBER),
    "device.memory_gb_per_s": Key(type=ValueType.NUMBER, scale=Decimal(GB)),
    "device.num_sms": Key(type=ValueType.COUNT),
    "device.host_gb_per_s": Key(type=ValueType.NUMBER, scale=Decimal(GB)),
    "device.power_watts": Key(type=ValueType.NUMBER, required=False),
    **{
        f"device.peak_tflops.{precision}": Key(
            type=ValueType.NUMBER, scale=Decimal(TFLOP), required=False
        )
        for precision in PRECISIONS
    },
    "node.gpus_per_node": Key(type=ValueType.COUNT),
    "node.host_memory_gib": Key(type=ValueType.NUMBER, scale=Decimal(GIB)),
    **{f"links.intra_node.{name}": key for name, key in _LINK.items()},
    "links.intra_node.devices": Key(type=ValueType.COUNT, required=False),
    "links.intra_node.peer_access": Key(type=ValueType.FLAG),
    **{f"links.inter_node.{name}": key for name, key in _LINK.items()},
}


def flatten(tables: Mapping[str, object], where: str) -> dict[str, Entry]:
    """Return one entry per dotted key of a parsed file; `[sources]` is resolved, not returned.

    Raises:
        ValueError: `[sources]` or an entry's table is not of its form; `where` opens the message.

    """
    sources = tables.get("sources", {})
    if not isinstance(sources, dict) or not all(isinstance(s, str) for s in sources.values()):
        raise ValueError(f"{where}: [sources] must map short names to texts")
    rest = {key: value for key, value in tables.items() if key not in ("schema", "sources")}
    return dict(_leaves(rest, "", sources, where))


def _leaves(
    table: Mapping[str, object], prefix: str, sources: Mapping[str, str], where: str
) -> Iterator[tuple[str, Entry]]:
    for name, value in table.items():
        key = prefix + name
        if isinstance(value, dict) and ("value" in value or prefix == "constants."):
            yield key, _entry(key, value, sources, where)
        elif isinstance(value, dict):
            yield from _leaves(value, key + ".", sources, where)
        else:
            yield key, Entry(value=value)


def _entry(key: str, table: Mapping[str, object], sources: Mapping[str, str], where: str) -> Entry:
    unknown = sorted(set(table) - _ENTRY_KEYS)
    if unknown:
        raise ValueError(f"{where}: {key}: {unknown[0]!r} is none of {sorted(_ENTRY_KEYS)}")
    for name in ("value", "kind", "source"):
        if name not in table:
            raise ValueError(f"{where}: {key}: {name} is missing beside {sorted(table)}")
    kind, source = table["kind"], table["source"]
    if kind not in SOURCE_KINDS:
        raise ValueError(f"{where}: {key}: kind must be one of {SOURCE_KINDS}, not {kind!r}")
    if not isinstance(source, str) or not source.strip():
        raise ValueError(f"{where}: {key}: source must be a text, not {source!r}")
    bounds = {b: _decimal(table[b], f"{where}: {key}.{b}") for b in ("low", "high") if b in table}
    name, colon, detail = source.partition(": ")  # "dgx: 8 x 400 Gb/s" cites `dgx` of [sources]
    return Entry(
        value=table["value"],
        kind=str(kind),
        source=sources.get(name, name) + colon + detail,
        low=bounds.get("low"),
        high=bounds.get("high"),
    )


def check(entries: Mapping[str, Entry], keys: Mapping[str, Key], where: str) -> None:
    """Refuse unknown, missing and ill-typed keys.

    Args:
        entries: The flat profile.
        keys: What may stand, and what must.
        where: File, for the message.

    Raises:
        ValueError: The first fault, with the allowed keys or values.

    """
    for name, entry in entries.items():
        if name not in keys:
            raise ValueError(f"{where}: {unknown_key(name, keys)}")
        checked_value(name, keys[name], entry.value, where)
    for name, key in keys.items():
        if key.required and name not in entries:
            raise ValueError(f"{where}: {name} is missing ({key.type.value})")


def unknown_key(name: str, keys: Iterable[str]) -> str:
    """Return the message for a key that no profile has, with the nearest ones."""
    known = sorted(keys)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    hint = f" (did you mean {' or '.join(near)}?)" if near else ""
    return f"unknown key {name!r}{hint}; the keys are: {', '.join(known)}"


def checked_value(name: str, key: Key, value: object, where: str) -> Decimal | bool | str:
    """Return a value of its key's type, unscaled; ValueError says what was expected."""
    shown = value if isinstance(value, Decimal) else repr(value)
    message = f"{where}: {name} must be {key.type.value}, not {shown}"
    if key.type is ValueType.FLAG:
        if not isinstance(value, bool):
            raise ValueError(message)
        return value
    if key.type in TEXTS:
        pattern = _NAME if key.type is ValueType.NAME else _TEXT
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise ValueError(message)
        return value
    number = _decimal(value, f"{where}: {name}")
    # Both ends of the float range: a number that SI units turn into 0 or infinity is none.
    size = float(number) * float(key.scale)
    is_zero = key.type is ValueType.CONSTANT and number == 0
    if not is_zero and (number <= 0 or not math.isfinite(size) or size == 0):
        raise ValueError(message)
    if key.type is ValueType.COUNT and number != number.to_integral_value():
        raise ValueError(message)
    if name == "device.usable_fraction" and number > 1:
        raise ValueError(f"{where}: {name} must be at most 1, not {number}")
    return number


def _decimal(value: object, where: str) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise ValueError(f"{where} must be a finite number, not {value!r}")  # noqa: TRY004 (input)
    number = Decimal(value)
    if not number.is_finite():
        raise ValueError(f"{where} must be a finite number, not {value}")
    return number
