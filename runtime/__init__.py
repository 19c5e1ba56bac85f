"""Lowers a plan to a graph with explicit collectives and runs it on torch.distributed."""
