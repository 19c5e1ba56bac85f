"""Machines as data: one TOML per machine, with a source on every number."""
