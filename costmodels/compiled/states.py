"""Generated from costmodels.formulas.states by costmodels.compile. Do not edit."""
# fmt: off

from typing import Any, NamedTuple

import numpy as np

Value = Any  # a float or an array that broadcasts with the other arguments


class ModelStates(NamedTuple):
    """Results of model_states."""

    parameters: Value
    gradients: Value
    optimizer: Value
    local_weights: Value
    cut_weights: Value


def model_states(*, expert_shards: Value, expert_weights: Value, gradient_bytes: Value, key_value_shards: Value, key_value_weights: Value, optimizer_bytes: Value, replicated_weights: Value, resident_bytes: Value, sharded_weights: Value, tensor_parallel: Value, weight_bytes: Value, zero_group: Value, zero_stage: Value) -> ModelStates:
    """Bytes of the states of some weights on one rank, and how many it works on."""
    t_0 = 1/expert_shards
    t_1 = np.maximum(1, tensor_parallel*zero_group*t_0)
    t_2 = expert_weights*t_0
    t_3 = replicated_weights + sharded_weights/tensor_parallel + key_value_weights/key_value_shards
    t_4 = t_2/t_1 + t_3/zero_group
    t_5 = t_2 + t_3
    return ModelStates(
        parameters=np.where(np.not_equal(np.greater_equal(zero_stage, 3) * 1.0, 0), resident_bytes*t_4, weight_bytes*t_5),
        gradients=np.where(np.not_equal(np.greater_equal(zero_stage, 2) * 1.0, 0), gradient_bytes*t_4, gradient_bytes*t_5),
        optimizer=np.where(np.not_equal(np.greater_equal(zero_stage, 1) * 1.0, 0), optimizer_bytes*t_4, optimizer_bytes*t_5),
        local_weights=t_5,
        cut_weights=np.where(np.not_equal(np.greater_equal(zero_group, 2) * 1.0, 0), t_3, 0) + np.where(np.not_equal(np.greater_equal(t_1, 2) * 1.0, 0), t_2, 0),
    )
