"""Columns of a table of measured runs: text, read as what they state; blanks mean "not stated"."""

from collections.abc import Mapping, Sequence

Row = Mapping[str, str]


class UnsupportedRowError(ValueError):
    """A row that the planner cannot express, with the reason."""


def runs_on(row: Row, software: Sequence[str]) -> bool:
    """Tell whether a row's framework is one of some, each given by a part of its name."""
    return any(part in row["framework"].lower() for part in software)


def integer(row: Row, column: str, default: int | None = None) -> int:
    """Return a whole number; without a default, UnsupportedRowError where it is not stated."""
    text = row[column]
    if not text:
        if default is None:
            raise UnsupportedRowError(f"{column} is not stated")
        return default
    try:
        value = float(text)
    except ValueError:
        raise UnsupportedRowError(f"{column} is {text!r}, not a number") from None
    if not value.is_integer():  # nor is NaN or an infinity
        raise UnsupportedRowError(f"{column} is {text!r}, not a whole number")
    return int(value)
