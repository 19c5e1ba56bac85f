"""The generated numpy modules are fresh and mean what the formulas mean."""

import importlib
import subprocess
import sys

import numpy as np
import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from costmodels.compile import compiled_path, existing_modules, main, module_source
from costmodels.formulas.functions import AtLeast, Ceil, Maximum, Select, maximum, minimum

MODULES = existing_modules()


@pytest.mark.parametrize("module", MODULES)
def test_compiled_module_is_fresh(module):
    assert compiled_path(module).read_text(encoding="utf-8") == module_source(module)


@pytest.mark.parametrize("module", MODULES)
def test_compiled_functions_equal_their_expressions(module):
    compiled = importlib.import_module(f"costmodels.compiled.{module}")
    rng = np.random.default_rng(0)
    for formula in importlib.import_module(f"costmodels.formulas.{module}").formulas():
        values = {s: float(rng.integers(1, 9)) for s in formula.quantities}
        results = getattr(compiled, formula.name)(**{s.name: v for s, v in values.items()})
        for (name, expr), got in zip(formula.results, results, strict=True):
            want = float(
                sympy.sympify(expr).xreplace({s: sympy.Float(v) for s, v in values.items()})
            )
            assert float(got) == pytest.approx(want, rel=1e-9, abs=1e-12), (formula.name, name)


@pytest.mark.parametrize("module", MODULES)
def test_scalars_and_arrays_agree_to_the_last_bit(module):
    compiled = importlib.import_module(f"costmodels.compiled.{module}")
    rng = np.random.default_rng(1)
    for formula in importlib.import_module(f"costmodels.formulas.{module}").formulas():
        columns = {s.name: rng.integers(1, 1000, 16).astype(float) for s in formula.quantities}
        table = getattr(compiled, formula.name)(**columns)
        for row in range(16):
            one = getattr(compiled, formula.name)(**{k: v[row] for k, v in columns.items()})
            for whole, single in zip(table, one, strict=True):
                assert np.broadcast_to(whole, 16)[row] == single, formula.name


@pytest.mark.parametrize("module", MODULES)
def test_every_quantity_says_its_unit_and_meaning(module):
    for formula in importlib.import_module(f"costmodels.formulas.{module}").formulas():
        for quantity in formula.quantities:
            assert quantity.unit, quantity
            assert quantity.meaning, quantity


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6))
def test_maximum_and_minimum_fold_numbers(a, b):
    assert float(maximum(a, b)) == max(a, b)
    assert float(minimum(a, b)) == min(a, b)


def test_derivative_of_a_maximum_follows_the_larger_argument():
    x, y = sympy.symbols("x y")
    slope = sympy.diff(Maximum(3 * x, y), x)
    assert slope.subs({x: 2, y: 1}) == 3
    assert slope.subs({x: 0, y: 1}) == 0


def test_steps_are_flat():
    x = sympy.Symbol("x")
    assert sympy.diff(Ceil(x), x) == 0
    assert sympy.diff(AtLeast(x, 2), x) == 0
    assert sympy.diff(Select(AtLeast(x, 2), 5 * x, x), x).subs(x, 3) == 5


def test_an_unknown_module_is_named(capsys):
    assert main(["nonsense"]) == 2
    assert "choose from" in capsys.readouterr().err


def test_compiled_modules_do_not_import_sympy():
    names = ", ".join(f"costmodels.compiled.{module}" for module in MODULES)
    code = f"import sys, {names}; sys.exit('sympy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
