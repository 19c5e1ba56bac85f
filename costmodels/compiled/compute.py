"""Generated from costmodels.formulas.compute by costmodels.compile. Do not edit."""
# fmt: off

from typing import Any, NamedTuple

import numpy as np

Value = Any  # a float or an array that broadcasts with the other arguments


class Gemm(NamedTuple):
    """Results of gemm."""

    seconds: Value


def gemm(*, count: Value, element_bytes: Value, gemm_efficiency: Value, k: Value, k_fill: Value, kernel_gap: Value, m: Value, memory_bandwidth: Value, memory_efficiency: Value, n: Value, num_sms: Value, peak: Value, tail_share: Value) -> Gemm:
    """Seconds of a matrix product, or of several of one shape in one launch."""
    t_0 = count/num_sms
    t_1 = t_0*np.ceil((1/128)*n)
    t_2 = t_1*np.ceil((1/256)*m)
    t_3 = num_sms*(k + k_fill)/(gemm_efficiency*peak)
    t_4 = np.ceil((1/128)*m)
    t_5 = t_1*t_4
    t_6 = t_0*np.ceil((1/64)*n)
    t_7 = t_4*t_6
    t_8 = t_6*np.ceil((1/64)*m)
    return Gemm(
        seconds=kernel_gap + np.maximum(np.minimum(np.minimum(np.minimum(65536*t_3*np.maximum(tail_share*(-t_2 + np.ceil(t_2)) + t_2, 1), (655360/19)*t_3*np.maximum(tail_share*(-t_5 + np.ceil(t_5)) + t_5, 1)), 20480*t_3*np.maximum(tail_share*(-t_7 + np.ceil(t_7)) + t_7, 1)), (40960/3)*t_3*np.maximum(tail_share*(-t_8 + np.ceil(t_8)) + t_8, 1)), count*element_bytes*(k*m + k*n + m*n)/(memory_bandwidth*memory_efficiency)),
    )


class Attention(NamedTuple):
    """Results of attention."""

    seconds: Value


def attention(*, attention_efficiency: Value, attention_flops: Value, head_width: Value, kernel_gap: Value, kernels: Value, length: Value, length_fill: Value, peak: Value) -> Attention:
    """Seconds of attention in one kernel."""
    return Attention(
        seconds=kernel_gap*kernels + (4/5)*attention_flops*(head_width + 32)*(length + length_fill)/(attention_efficiency*head_width*length*peak),
    )


class MemoryPass(NamedTuple):
    """Results of memory_pass."""

    seconds: Value


def memory_pass(*, kernel_gap: Value, kernels: Value, memory_bandwidth: Value, memory_efficiency: Value, moved: Value) -> MemoryPass:
    """Seconds of kernels that only move memory."""
    return MemoryPass(
        seconds=kernel_gap*kernels + moved/(memory_bandwidth*memory_efficiency),
    )


class Overlap(NamedTuple):
    """Results of overlap."""

    exposed: Value


def overlap(*, communication: Value, hidden_by: Value, slowdown: Value) -> Overlap:
    """Seconds that communication adds beside computation that may hide it."""
    return Overlap(
        exposed=slowdown*np.minimum(communication, hidden_by) + np.maximum(communication - hidden_by, 0),
    )
