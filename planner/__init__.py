"""Finds, proves, explains and emits the fastest layout of a training run."""

__version__ = "0.1.0"
