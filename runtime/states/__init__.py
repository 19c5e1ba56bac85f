"""Weights, gradients and optimizer states of a rank, cut as ZeRO says, and the update."""
