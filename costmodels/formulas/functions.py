"""The functions that formulas need beside arithmetic, and the Formula record.

sympy's own Max and Min try to decide which argument is larger, which takes minutes on our
expressions; ceil and piecewise have no derivative there. These print as numpy ufuncs, which
broadcast scalars with arrays, and differentiate as an engineer would: the derivative of a maximum
is that of its larger argument, a step function is flat.
"""

from dataclasses import dataclass

import sympy
from sympy import Expr


class Maximum(sympy.Function):  # type: ignore[misc]  # sympy carries no types
    """The larger of two values."""

    nargs = 2

    @classmethod
    def eval(cls, a: Expr, b: Expr) -> Expr | None:
        """Fold numbers."""
        return (max(a, b)) if a.is_number and b.is_number else None

    def fdiff(self, argindex: int = 1) -> Expr:
        """Follow the larger argument (the first where both are equal)."""
        a, b = self.args
        return Select(AtLeast(a, b), 1, 0) if argindex == 1 else Select(AtLeast(a, b), 0, 1)


class Minimum(sympy.Function):  # type: ignore[misc]  # sympy carries no types
    """The smaller of two values."""

    nargs = 2

    @classmethod
    def eval(cls, a: Expr, b: Expr) -> Expr | None:
        """Fold numbers."""
        return (min(a, b)) if a.is_number and b.is_number else None

    def fdiff(self, argindex: int = 1) -> Expr:
        """Follow the smaller argument (the first where both are equal)."""
        a, b = self.args
        return Select(AtLeast(b, a), 1, 0) if argindex == 1 else Select(AtLeast(b, a), 0, 1)


class Ceil(sympy.Function):  # type: ignore[misc]  # sympy carries no types
    """The smallest whole number that is not smaller; flat between steps."""

    nargs = 1

    @classmethod
    def eval(cls, a: Expr) -> Expr | None:
        """Fold numbers."""
        return sympy.ceiling(a) if a.is_number else None

    def fdiff(self, argindex: int = 1) -> Expr:  # noqa: ARG002  (sympy's signature)
        """Return zero: whole numbers do not move."""
        return sympy.Integer(0)


class AtLeast(sympy.Function):  # type: ignore[misc]  # sympy carries no types
    """1 where the first argument is not smaller than the second, else 0."""

    nargs = 2

    @classmethod
    def eval(cls, a: Expr, b: Expr) -> Expr | None:
        """Fold numbers."""
        return sympy.Integer(bool(a >= b)) if a.is_number and b.is_number else None

    def fdiff(self, argindex: int = 1) -> Expr:  # noqa: ARG002
        """Return zero: a step is flat."""
        return sympy.Integer(0)


class Select(sympy.Function):  # type: ignore[misc]  # sympy carries no types
    """The second argument where the first is not zero, else the third."""

    nargs = 3

    @classmethod
    def eval(cls, condition: Expr, yes: Expr, no: Expr) -> Expr | None:
        """Fold a known condition and equal branches."""
        if condition.is_number:
            return yes if condition != 0 else no
        return yes if yes == no else None

    def fdiff(self, argindex: int = 1) -> Expr:
        """Follow the chosen branch."""
        condition = self.args[0]
        return (
            sympy.Integer(0),
            Select(condition, 1, 0),
            Select(condition, 0, 1),
        )[argindex - 1]


def maximum(*values: Expr | float) -> Expr:
    """Return the largest of any number of values."""
    result, *rest = (sympy.sympify(value) for value in values)
    for value in rest:
        result = Maximum(result, value)
    return result


def minimum(*values: Expr | float) -> Expr:
    """Return the smallest of any number of values."""
    result, *rest = (sympy.sympify(value) for value in values)
    for value in rest:
        result = Minimum(result, value)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """One compiled function: named results over the quantities that they mention.

    Attributes:
        name: Function name in the generated module; the result type is its CamelCase.
        summary: One line: what it gives, in which unit.
        results: (name, expression) pairs, in the order of the result's fields.

    """

    name: str
    summary: str
    results: tuple[tuple[str, Expr], ...]

    @property
    def quantities(self) -> tuple[sympy.Symbol, ...]:
        """The symbols that the results depend on, by name."""
        found = set[sympy.Symbol]().union(*(expr.free_symbols for _, expr in self.results))
        return tuple(sorted(found, key=lambda symbol: symbol.name))
