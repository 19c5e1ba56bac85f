"""Measured runs: read as planner inputs, predicted, compared, and fitted to.

columns, models, layouts, rows    a table of published runs, row by row, as planner inputs
validate, errors                  every row predicted; how far off
fit, fit_loss, fit_parameters, robust_step    constants of generations from all runs
fit_profile                       constants of one machine from its own runs
runs, sweeps                      what this project's own runtime measured
"""
