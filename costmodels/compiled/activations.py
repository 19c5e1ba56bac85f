"""Generated from costmodels.formulas.activations by costmodels.compile. Do not edit."""
# fmt: off

from typing import Any, NamedTuple

import numpy as np

Value = Any  # a float or an array that broadcasts with the other arguments


class LayerActivations(NamedTuple):
    """Results of layer_activations."""

    layer_input: Value
    norm_inputs: Value
    norm_copies: Value
    norm_outputs: Value
    latents: Value
    queries_keys_values: Value
    qk_norm_inputs: Value
    attention_scores: Value
    attention_output: Value
    ffn_hidden: Value
    ffn_activation: Value
    routing: Value
    expert_inputs: Value
    expert_hidden: Value
    expert_activation: Value
    expert_answers: Value
    alternate_operations: Value
    exchanged_tokens: Value
    linear_operands: Value
    backward_transient: Value
    attention_transient: Value
    answers_transient: Value


def layer_activations(*, answered_tokens: Value, element_bytes: Value, expert_tensor_parallel: Value, expert_width: Value, ffn_copies: Value, ffn_inputs: Value, ffn_width: Value, hidden: Value, input_bytes: Value, input_shards: Value, key_length: Value, key_value_shards: Value, key_width: Value, latent_width: Value, norm_copy_bytes: Value, num_experts: Value, num_heads: Value, num_input_norms: Value, num_output_norms: Value, output_width: Value, qk_norm_width: Value, query_width: Value, released_width: Value, routed_tokens: Value, router_bytes: Value, score_bytes: Value, score_gradient_bytes: Value, sequence_shards: Value, tensor_parallel: Value, tokens: Value, value_width: Value) -> LayerActivations:
    """Bytes that one layer and micro-batch keep on a rank, by what keeps them."""
    t_0 = 1/sequence_shards
    t_1 = hidden*t_0
    t_2 = element_bytes*tokens
    t_3 = t_1*t_2
    t_4 = num_input_norms + num_output_norms
    t_5 = hidden*input_bytes
    t_6 = tokens*t_5/input_shards
    t_7 = latent_width*t_2
    t_8 = 1/tensor_parallel
    t_9 = query_width*t_8
    t_10 = 1/key_value_shards
    t_11 = t_10*(key_width + value_width) + t_9
    t_12 = t_11*t_2
    t_13 = num_heads*tokens*t_8
    t_14 = output_width*t_8
    t_15 = t_14*t_2
    t_16 = ffn_copies + ffn_inputs
    t_17 = ffn_width*t_8
    t_18 = t_17*t_2
    t_19 = input_bytes*tokens*t_17
    t_20 = 1/expert_tensor_parallel
    t_21 = expert_width*t_20
    t_22 = element_bytes*routed_tokens
    t_23 = element_bytes*hidden
    t_24 = answered_tokens*t_23
    t_25 = 2*hidden*t_2
    t_26 = ffn_inputs*t_18
    t_27 = t_25*(1 - t_0) + 2*t_3
    return LayerActivations(
        layer_input=t_3,
        norm_inputs=t_3*(t_4 - 1),
        norm_copies=norm_copy_bytes*tokens*t_1*t_4,
        norm_outputs=t_6,
        latents=t_7,
        queries_keys_values=t_12,
        qk_norm_inputs=qk_norm_width*t_2*t_8,
        attention_scores=t_13*(key_length*score_bytes + 4),
        attention_output=t_15,
        ffn_hidden=t_16*t_18,
        ffn_activation=t_19,
        routing=num_experts*router_bytes*tokens*t_0,
        expert_inputs=routed_tokens*t_5,
        expert_hidden=t_16*t_21*t_22,
        expert_activation=input_bytes*routed_tokens*t_21,
        expert_answers=t_24,
        alternate_operations=4*t_13 + t_15 + t_2*(value_width*t_10 + t_1 + t_17 + t_9),
        exchanged_tokens=2*routed_tokens*t_23,
        linear_operands=t_12 + t_15 + t_19 + t_25 + t_26 + 2*t_6 + t_7,
        backward_transient=t_27 + np.maximum(t_26, element_bytes*routed_tokens*(ffn_inputs*t_21 + hidden) - released_width*t_20*t_22 - t_24),
        attention_transient=t_27 + np.maximum(t_2*(t_11 + t_14), key_length*score_gradient_bytes*t_13),
        answers_transient=2*t_24 + t_27,
    )
