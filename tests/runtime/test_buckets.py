"""One bucket by itself: gradients are summed over micro-batches, and forgotten between steps."""

import pytest
import torch
from torch import nn

from runtime.communication.mesh import Group
from runtime.program import ParameterShard
from runtime.states.buckets import Bucket
from runtime.states.sharing import Sharing

ALONE = Group(axis="dp", ranks=(0,), index=0, backend="none", handle=None)


def make_bucket(dtype, *, cut):
    """Return a bucket of two parameters; if cut, its gradients go after each backward."""
    parameters = [
        (ParameterShard(name=name, global_shape=shape), nn.Parameter(torch.ones(shape).to(dtype)))
        for name, shape in (("used", (3, 2)), ("sometimes", (4,)))
    ]
    sharing = Sharing(
        zero_stage=3 if cut else 0,
        data=ALONE,
        zero=ALONE,
        replicas=ALONE,
        copies=(),
        is_counted=True,
        is_owner=True,
        on_host=frozenset({"optimizer", "weights"} if cut else ()),
    )
    return Bucket(parameters, sharing, grad_dtype=torch.float32, master_dtype=torch.float32)


def backward(bucket, gradients):
    """Do what autograd does for each parameter that has a gradient: set it, or add to it."""
    for index, gradient in gradients.items():
        parameter = bucket.parameters[index]
        value = torch.full(parameter.shape, gradient, dtype=parameter.dtype)
        parameter.grad = value if parameter.grad is None else parameter.grad.add_(value)
        bucket.collect(index)


def step(bucket, *micro_batches, cut):
    for number, gradients in enumerate(micro_batches, 1):
        backward(bucket, gradients)
        if cut or number == len(micro_batches):
            bucket.start_reduce()
    bucket.finish_reduce()
    found = bucket.gradients.clone()
    bucket.clear_gradients()
    return found.tolist()


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gradients_of_micro_batches_are_added_and_those_of_the_last_step_are_gone(dtype, cut):
    bucket = make_bucket(dtype, cut=cut)
    assert step(bucket, {0: 1.0, 1: 2.0}, {0: 4.0, 1: 8.0}, cut=cut) == [5.0] * 6 + [10.0] * 4
    assert step(bucket, {0: 1.0, 1: 2.0}, {0: 4.0}, cut=cut) == [5.0] * 6 + [2.0] * 4
    assert step(bucket, {0: 1.0}, {0: 4.0}, cut=cut) == [5.0] * 6 + [0.0] * 4
    assert step(bucket, {1: 3.0}, {0: 4.0}, cut=cut) == [4.0] * 6 + [3.0] * 4


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gradients_of_first_halves_wait_by_themselves_and_are_added_to_the_second(dtype, cut):
    bucket = make_bucket(dtype, cut=cut)
    for _ in range(2):  # the second step knows nothing of the first
        for gradient in (1.0, 4.0):  # I of two micro-batches
            parameter = bucket.parameters[0]
            value = torch.full(parameter.shape, gradient, dtype=dtype)
            parameter.grad = value if parameter.grad is None else parameter.grad.add_(value)
            bucket.collect_early(0)
        for last, gradient in enumerate((2.0, 8.0)):  # W of both
            backward(bucket, {1: gradient})
            if cut or last:
                bucket.start_reduce()
        bucket.finish_reduce()
        assert bucket.gradients.tolist() == [5.0] * 6 + [10.0] * 4
        bucket.clear_gradients()
