"""Frozen records to JSON and back, strictly.

`encode` writes what a dataclass says; `decode` builds it again and refuses whatever does not
belong: unknown or missing keys, wrong types, numbers that are not finite. Nothing is executed:
a plan is data from strangers.

Floats are rounded to 9 significant digits, so that the same inputs give the same bytes.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

MAX_INTEGER = 2**53  # JSON readers agree on integers up to here (RFC 8259, section 6)
SIGNIFICANT_DIGITS = 9  # chosen: beyond any model's truth, below float noise

# Control characters, line and paragraph separators, halves of surrogate pairs: a terminal obeys
# some of them, and no name holds any.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class DecodeError(ValueError):
    """A JSON value that does not fit the record it should be."""


def rounded(value: float) -> float:
    """Return a float with 9 significant digits; ValueError where JSON has no such number."""
    if not math.isfinite(value):
        message = f"{value} cannot be written as JSON"
        raise ValueError(message)
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


def encode(value: object) -> Json:
    """Return the JSON form of records, tuples, enumerations and plain values."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, StrEnum):
        return value.value
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return rounded(value)
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [encode(item) for item in value]
    message = f"cannot write a {type(value).__name__} as JSON"
    raise TypeError(message)


def decode(kind: type[T], value: object, where: str) -> T:
    """Build a record from JSON.

    Args:
        kind: The dataclass to build.
        value: What the JSON reader returned.
        where: Path of the value in the file, for messages ("layout").

    Raises:
        DecodeError: A key is unknown or missing, or a value has the wrong type or is refused
            by the record itself.

    """
    if not isinstance(value, dict):
        raise DecodeError(f"{where} must be an object, not {_shown(value)}")
    hints = _hints(kind)  # type: ignore[arg-type]  # classes are hashable
    unknown = sorted(set(value) - set(hints))
    if unknown:
        known = ", ".join(sorted(hints))
        raise DecodeError(f"{where} has an unknown key {unknown[0]!r}; known keys: {known}")
    arguments: dict[str, Any] = {}
    for field in fields(kind):  # type: ignore[arg-type]  # a dataclass, by contract
        if field.name in value:
            place = f"{where}.{field.name}"
            arguments[field.name] = _decode_value(hints[field.name], value[field.name], place)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise DecodeError(f"{where} lacks the key {field.name!r}")
    try:
        return kind(**arguments)
    except ValueError as error:
        raise DecodeError(f"{where}: {error}") from error


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _decode_value(kind: Any, value: object, where: str) -> Any:  # noqa: ANN401  # any annotated type
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return _decode_union(kind, value, where)
    if origin is tuple:
        return _decode_tuple(get_args(kind), value, where)
    if isinstance(kind, type) and is_dataclass(kind):
        return decode(kind, value, where)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return _decode_enum(kind, value, where)
    return _decode_plain(kind, value, where)


def _decode_union(kind: Any, value: object, where: str) -> Any:  # noqa: ANN401
    options = get_args(kind)
    if value is None and NoneType in options:
        return None
    rest = [option for option in options if option is not NoneType]
    problems = []
    for option in rest:
        try:
            return _decode_value(option, value, where)
        except DecodeError as error:
            problems.append(str(error))
    raise DecodeError(problems[0])


def _decode_tuple(items: tuple[Any, ...], value: object, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise DecodeError(f"{where} must be a list, not {_shown(value)}")
    if items[-1] is Ellipsis:
        items = (items[0],) * len(value)
    if len(items) != len(value):
        raise DecodeError(f"{where} must have {len(items)} entries, not {len(value)}")
    return tuple(
        _decode_value(item, entry, f"{where}[{place}]")
        for place, (item, entry) in enumerate(zip(items, value, strict=True))
    )


def _decode_enum(kind: type[StrEnum], value: object, where: str) -> StrEnum:
    names = [member.value for member in kind]
    if not isinstance(value, str) or value not in names:
        raise DecodeError(f"{where} must be one of {', '.join(names)}, not {_shown(value)}")
    return kind(value)


def _decode_plain(kind: Any, value: object, where: str) -> Any:  # noqa: ANN401
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) <= MAX_INTEGER else value
    if type(value) is not kind:  # exact: JSON true is not the number 1
        raise DecodeError(f"{where} must be {kind.__name__}, not {_shown(value)}")
    # Sources are whatever a profile's author wrote; no verb prints them from a plan.
    if isinstance(value, str) and not where.endswith(".source") and _UNPRINTABLE.search(value):
        raise DecodeError(f"{where} must be one line of printable text, not {_shown(value)}")
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise DecodeError(f"{where} must be at most {MAX_INTEGER} in size, not {_shown(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise DecodeError(f"{where} must be a finite number, not {value}")
    return value


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."  # noqa: PLR2004  # a line of a message
