"""Compile the formulas to numpy: `python -m costmodels.compile [MODULE ...]`.

Each module of `costmodels.formulas` becomes a module of the same name in `costmodels.compiled`:
one function per Formula, keyword arguments named like its quantities, common subexpressions
computed once, a named tuple as the result. Arguments may be scalars or arrays that broadcast;
both go through the same ufuncs, so a table and a single layout agree to the last bit.
The generated files are committed and tests/costmodels/test_compile.py keeps them fresh.
"""

import importlib
import sys
from pathlib import Path

import sympy
from sympy.printing.pycode import PythonCodePrinter

from costmodels.formulas.functions import Formula

MODULES = ("compute", "collectives", "states", "activations", "step")

_HEADER = '''"""Generated from costmodels.formulas.{module} by costmodels.compile. Do not edit."""
# fmt: off

from typing import Any, NamedTuple

import numpy as np

Value = Any  # a float or an array that broadcasts with the other arguments
'''


class _NumpyPrinter(PythonCodePrinter):  # type: ignore[misc]  # sympy carries no types
    """Print an expression as numpy code."""

    def _call(self, name: str, expr: sympy.Expr) -> str:
        return f"np.{name}({', '.join(self._print(arg) for arg in expr.args)})"

    def _print_Maximum(self, expr: sympy.Expr) -> str:  # noqa: N802  (sympy's dispatch)
        return self._call("maximum", expr)

    def _print_Minimum(self, expr: sympy.Expr) -> str:  # noqa: N802
        return self._call("minimum", expr)

    def _print_Ceil(self, expr: sympy.Expr) -> str:  # noqa: N802
        return self._call("ceil", expr)

    def _print_AtLeast(self, expr: sympy.Expr) -> str:  # noqa: N802
        return self._call("greater_equal", expr) + " * 1.0"

    def _print_Select(self, expr: sympy.Expr) -> str:  # noqa: N802
        condition, yes, no = (self._print(arg) for arg in expr.args)
        return f"np.where(np.not_equal({condition}, 0), {yes}, {no})"

    def _print_log(self, expr: sympy.Expr) -> str:
        return self._call("log", expr)

    def _print_exp(self, expr: sympy.Expr) -> str:
        return self._call("exp", expr)


def function_source(formula: Formula) -> str:
    """Return the result type and the function of one formula."""
    printer = _NumpyPrinter({"fully_qualified_modules": False})
    result_type = "".join(part.capitalize() for part in formula.name.split("_"))
    names, exprs = zip(*formula.results, strict=True)
    shared, reduced = sympy.cse(exprs, symbols=sympy.numbered_symbols("t_"), order="canonical")
    arguments = ", ".join(f"{symbol.name}: Value" for symbol in formula.quantities)
    lines = [
        "",
        "",
        f"class {result_type}(NamedTuple):",
        f'    """Results of {formula.name}."""',
        "",
        *(f"    {name}: Value" for name in names),
        "",
        "",
        f"def {formula.name}(*, {arguments}) -> {result_type}:",
        f'    """{formula.summary}"""',
        *(f"    {symbol} = {printer.doprint(expr)}" for symbol, expr in shared),
        f"    return {result_type}(",
        *(
            f"        {name}={printer.doprint(expr)},"
            for name, expr in zip(names, reduced, strict=True)
        ),
        "    )",
    ]
    return "\n".join(lines)


def module_source(module: str) -> str:
    """Return the whole text of one generated module."""
    formulas = importlib.import_module(f"costmodels.formulas.{module}").formulas()
    parts = [_HEADER.format(module=module).rstrip(), *(function_source(f) for f in formulas)]
    return "\n".join(parts) + "\n"


def compiled_path(module: str) -> Path:
    """Return where a generated module lies."""
    return Path(__file__).parent / "compiled" / f"{module}.py"


def existing_modules() -> tuple[str, ...]:
    """Return the modules whose formulas are there."""
    folder = Path(__file__).parent / "formulas"
    return tuple(module for module in MODULES if (folder / f"{module}.py").exists())


def main(arguments: list[str]) -> int:
    """Write the generated modules (all of them, or those named)."""
    unknown = [name for name in arguments if name not in MODULES]
    if unknown:
        sys.stderr.write(f"unknown module {unknown[0]!r}; choose from {', '.join(MODULES)}\n")
        return 2
    for module in arguments or existing_modules():
        path = compiled_path(module)
        partial = path.with_suffix(".py.partial")
        partial.write_text(module_source(module), encoding="utf-8")
        partial.replace(path)
        sys.stderr.write(f"wrote {path}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
