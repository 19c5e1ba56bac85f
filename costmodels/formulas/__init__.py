"""Cost formulas as sympy expressions: the source that is compiled, printed and differentiated.

Nothing on the path of `search` or `estimate` imports this package: they call the numpy functions
that `python -m costmodels.compile` generates from it (`costmodels.compiled`). Each module here
offers `formulas() -> tuple[Formula, ...]`; a new module is added to `costmodels.compile.MODULES`.
"""
