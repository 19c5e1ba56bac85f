"""Measured runs: read as planner inputs, predicted, compared, and fitted to."""
