"""Generated from costmodels.formulas.collectives by costmodels.compile. Do not edit."""
# fmt: off

from typing import Any, NamedTuple

import numpy as np

Value = Any  # a float or an array that broadcasts with the other arguments


class AllGather(NamedTuple):
    """Results of all_gather."""

    seconds: Value


def all_gather(*, base_latency: Value, inner: Value, inner_bandwidth: Value, inner_latency: Value, outer: Value, outer_bandwidth: Value, outer_latency: Value, payload: Value) -> AllGather:
    """Seconds of an all-gather or a reduce-scatter."""
    t_0 = outer - 1
    t_1 = inner - 1
    t_2 = inner*outer - 1
    t_3 = payload*t_2/outer
    return AllGather(
        seconds=base_latency*np.minimum(t_2, 1) + inner_latency*outer*t_1 + outer_latency*t_0 + np.maximum(t_3*np.minimum(t_1, 1)/(inner*inner_bandwidth), t_3*np.minimum(t_0, 1)/(inner**2*outer_bandwidth)),
    )


class AllReduce(NamedTuple):
    """Results of all_reduce."""

    seconds: Value


def all_reduce(*, base_latency: Value, inner: Value, inner_bandwidth: Value, inner_latency: Value, outer: Value, outer_bandwidth: Value, outer_latency: Value, payload: Value) -> AllReduce:
    """Seconds of an all-reduce."""
    t_0 = inner*outer - 1
    t_1 = outer - 1
    t_2 = 2*outer_latency
    t_3 = inner - 1
    t_4 = payload*t_0/outer
    return AllReduce(
        seconds=base_latency*np.minimum(t_0, 1) + 2*np.maximum(t_4*np.minimum(t_3, 1)/(inner*inner_bandwidth), t_4*np.minimum(t_1, 1)/(inner**2*outer_bandwidth)) + np.minimum(2*inner_latency*outer*t_3 + t_1*t_2, inner_latency*(2*inner - 2) + t_2*np.log(outer)/np.log(2)),
    )


class AllToAll(NamedTuple):
    """Results of all_to_all."""

    seconds: Value


def all_to_all(*, across_share: Value, base_latency: Value, inner: Value, inner_bandwidth: Value, inner_latency: Value, outer: Value, outer_bandwidth: Value, outer_latency: Value, payload: Value) -> AllToAll:
    """Seconds of an all-to-all."""
    t_0 = inner - 1
    t_1 = inner*outer
    t_2 = payload/(inner*outer)
    return AllToAll(
        seconds=base_latency*np.minimum(t_1 - 1, 1) + inner_latency*np.minimum(t_0, 1) + outer_latency*np.minimum(outer - 1, 1) + np.maximum(t_0*t_2/inner_bandwidth, across_share*t_2*(-inner + t_1)/outer_bandwidth),
    )


class Send(NamedTuple):
    """Results of send."""

    seconds: Value


def send(*, base_latency: Value, inner_bandwidth: Value, inner_latency: Value, outer: Value, outer_bandwidth: Value, outer_latency: Value, payload: Value) -> Send:
    """Seconds of a point-to-point message."""
    t_0 = np.minimum(outer - 1, 1)
    return Send(
        seconds=base_latency + t_0*(outer_latency + payload/outer_bandwidth) + (1 - t_0)*(inner_latency + payload/inner_bandwidth),
    )
