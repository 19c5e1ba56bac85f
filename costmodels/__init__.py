"""Symbols in, seconds and bytes out: what one training step of one layout costs."""
