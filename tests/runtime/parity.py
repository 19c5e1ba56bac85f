"""What ranks hold, compared with one process: piece by piece, so that nothing is gathered."""

import math

import torch


def gradient_errors(states, mesh, reference):
    """Return each parameter's worst gradient error over its largest entry, for this rank's pieces.

    `reference` maps names to whole gradients. The floor keeps tensors whose gradients vanish from
    dividing rounding by nothing.
    """
    errors = {}
    for bucket in states.buckets:
        for segment in bucket.segments:
            whole = reference[segment.shard.name]
            expected = piece_of(segment, whole, mesh)
            error = (bucket.gradients[segment.place] - expected).abs().max()
            scale = max(float(whole.abs().max()), 1e-3)
            name = segment.shard.name
            errors[name] = larger(errors.get(name, 0.0), float(error) / scale)
    return errors


def weight_errors(states, mesh, reference):
    """Return each parameter's worst absolute error, for this rank's pieces."""
    errors = {}
    for bucket in states.buckets:
        for segment in bucket.segments:
            expected = piece_of(segment, reference[segment.shard.name], mesh)
            error = float((segment.master - expected).abs().max())
            errors[segment.shard.name] = larger(errors.get(segment.shard.name, 0.0), error)
    return errors


def piece_of(segment, whole, mesh):
    """Cut from a whole tensor what a segment holds of it."""
    return segment.shard.of_rank(whole, mesh).reshape(-1)[segment.start : segment.stop]


def larger(error, other):
    """Return the larger of two errors; one that is no number is larger than any."""
    return math.inf if math.isnan(error) or math.isnan(other) else max(error, other)


def worst(errors):
    """Return the largest error and its name."""
    name = max(errors, key=errors.get, default="")
    return errors.get(name, 0.0), name


def sgd_step(parameters, rate):
    """Update plain parameters with their gradients and forget those."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.sub_(rate * parameter.grad)
            parameter.grad = None
