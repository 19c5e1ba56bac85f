"""Generated numpy functions, one module per module of `costmodels.formulas`.

Do not edit: change the formula and run `python -m costmodels.compile`. A test compares.
"""
