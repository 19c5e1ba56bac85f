"""Quantities: the symbols that formulas are written in, each with a unit and a meaning.

A Quantity is a sympy Symbol, so formulas are ordinary expressions; `explain` prints the meaning
and the unit beside the number. Quantities are equal by name: one name has one meaning everywhere.
Declare those that several formulas share here, private ones beside their formula.
"""

from typing import Self

import sympy


class Quantity(sympy.Symbol):  # type: ignore[misc]  # sympy carries no types
    """A non-negative number with a unit and a meaning."""

    unit: str
    meaning: str

    def __new__(cls, name: str, unit: str, meaning: str) -> Self:
        """Make the symbol of a name.

        Args:
            name: A Python identifier; the keyword of the compiled function.
            unit: SI unit, "1" for counts and ratios.
            meaning: What is counted, in a few words.

        """
        symbol: Self = super().__new__(cls, name, nonnegative=True)
        symbol.unit = unit
        symbol.meaning = meaning
        return symbol
