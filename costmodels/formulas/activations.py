"""Bytes that one micro-batch leaves behind on one rank until its backward pass.

What is kept is what backward reads: the input of every matrix product (for its weight's
gradient), the inputs of norms, activations and attention, the output and the log-sum-exp of flash
attention, or the probabilities of an attention that writes them. Additions keep nothing. With T
tokens on the rank (micro_batch_size * seq_len / context_parallel), e bytes per value, t the tensor
axis and s = t under sequence parallelism, else 1, one dense layer keeps

    e T (2 H / s  norm inputs  +  2 H / s  norm outputs
         + (2 A D + 2 G D) / t  queries, keys, values, attention output
         + (inputs + 1) F / t  feed-forward)  + 4 T A / t  log-sum-exp

Source: Korthikanti et al. 2022 (arXiv:2205.05198, section 4), without dropout, extended to grouped
and latent attention, gated blocks, flash attention and experts. Checked against measured peaks of
truncated Llama-70B and DeepSeek-V2 (tests/costmodels/test_memory_measured.py).
"""

from sympy import Expr

from costmodels.formulas.functions import Formula, Maximum
from costmodels.symbols import Quantity

tokens = Quantity("tokens", "1", "tokens of a micro-batch on one rank, before sequence parallelism")
key_length = Quantity("key_length", "1", "keys that a query meets in an unfused attention")
element_bytes = Quantity("element_bytes", "bytes", "one activation value")
input_bytes = Quantity("input_bytes", "bytes", "one value of a kept matrix-product input")
hidden = Quantity("hidden", "1", "hidden size")
tensor_parallel = Quantity("tensor_parallel", "1", "ranks that cut matrices")
sequence_shards = Quantity("sequence_shards", "1", "pieces of a sequence outside matrix products")
input_shards = Quantity("input_shards", "1", "pieces of a kept input of a column-parallel matrix")
num_heads = Quantity("num_heads", "1", "attention heads")
query_width = Quantity("query_width", "1", "all queries of a token")
key_width = Quantity("key_width", "1", "all keys of a token")
value_width = Quantity("value_width", "1", "all values of a token")
output_width = Quantity("output_width", "1", "attention output of a token")
key_value_shards = Quantity("key_value_shards", "1", "pieces of keys and values; heads at most")
latent_width = Quantity(
    "latent_width", "1", "compressed queries, keys and values, before and after"
)
num_input_norms = Quantity("num_input_norms", "1", "norms before a block: 2, or 1 when parallel")
num_output_norms = Quantity("num_output_norms", "1", "norms after a block (Gemma-2)")
norm_copy_bytes = Quantity(
    "norm_copy_bytes", "bytes", "copies that an unfused norm keeps per value"
)
qk_norm_width = Quantity("qk_norm_width", "1", "queries and keys kept before their own norm")
score_bytes = Quantity("score_bytes", "bytes", "kept per attention score; 0 with flash attention")
score_gradient_bytes = Quantity(
    "score_gradient_bytes", "bytes", "gradients alive per attention score; 0 with flash attention"
)
ffn_width = Quantity("ffn_width", "1", "feed-forward (or shared experts') width")
ffn_inputs = Quantity("ffn_inputs", "1", "matrices into the block: 2 when gated")
ffn_copies = Quantity("ffn_copies", "1", "further kept widths of an unfused gate")
num_experts = Quantity("num_experts", "1", "routed experts")
router_bytes = Quantity("router_bytes", "bytes", "kept per token and expert by routing")
routed_tokens = Quantity("routed_tokens", "1", "token copies that the rank's experts work on")
answered_tokens = Quantity(
    "answered_tokens", "1", "experts' answers that a rank keeps until they are weighed backward"
)
expert_width = Quantity("expert_width", "1", "width of one expert")
released_width = Quantity(
    "released_width", "1", "of an expert's kept widths, gone when its widest gradient comes"
)
expert_tensor_parallel = Quantity("expert_tensor_parallel", "1", "ranks that cut one expert")


def layer_input() -> Expr:
    """Return the residual stream at the top of a layer: all that full recomputation keeps."""
    return element_bytes * tokens * hidden / sequence_shards


def norm_inputs() -> Expr:
    """Return the residual stream before the later norms, and outputs that are normed."""
    return layer_input() * (num_input_norms - 1 + num_output_norms)


def norm_copies() -> Expr:
    """Return fp32 copies and scaled values that an unfused norm keeps."""
    norms = num_input_norms + num_output_norms
    return norm_copy_bytes * tokens * hidden / sequence_shards * norms


def norm_outputs() -> Expr:
    """Return what column-parallel matrices keep of their inputs (one block's)."""
    return input_bytes * tokens * hidden / input_shards


def latents() -> Expr:
    """Return the compressed queries, keys and values of latent attention, whole on each rank."""
    return element_bytes * tokens * latent_width


def queries_keys_values() -> Expr:
    """Return what the attention core reads."""
    keys_values = (key_width + value_width) / key_value_shards
    return element_bytes * tokens * (query_width / tensor_parallel + keys_values)


def qk_norm_inputs() -> Expr:
    """Return queries and keys before their own norm."""
    return element_bytes * tokens * qk_norm_width / tensor_parallel


def attention_scores() -> Expr:
    """Return probabilities (unfused), or the log-sum-exp that flash attention keeps instead."""
    heads = num_heads / tensor_parallel
    return tokens * heads * (4 + score_bytes * key_length)


def attention_output() -> Expr:
    """Return the attention output: kept by flash attention and by the output matrix, once."""
    return element_bytes * tokens * output_width / tensor_parallel


def ffn_hidden() -> Expr:
    """Return the input of the activation."""
    return element_bytes * tokens * ffn_width / tensor_parallel * (ffn_inputs + ffn_copies)


def ffn_activation() -> Expr:
    """Return the output of the activation, the input of the last matrix."""
    return input_bytes * tokens * ffn_width / tensor_parallel


def routing() -> Expr:
    """Return scores, probabilities and the map from tokens to experts."""
    return router_bytes * tokens / sequence_shards * num_experts


def expert_inputs() -> Expr:
    """Return the tokens sorted by expert, as their first matrix keeps them."""
    return input_bytes * routed_tokens * hidden


def expert_hidden() -> Expr:
    """Return the input of the experts' activation."""
    width = expert_width / expert_tensor_parallel
    return element_bytes * routed_tokens * width * (ffn_inputs + ffn_copies)


def expert_activation() -> Expr:
    """Return the output of the experts' activation."""
    return input_bytes * routed_tokens * expert_width / expert_tensor_parallel


def expert_answers() -> Expr:
    """Return the answers of each token's experts, which the gradients of their weights need."""
    return element_bytes * answered_tokens * hidden


def alternate_operations() -> Expr:
    """Return what torchtitan's per-operation policy keeps of a dense block.

    Results of every second matrix product (query, value, gate, down) and of attention.
    """
    value = value_width / key_value_shards
    widths = query_width / tensor_parallel + value + ffn_width / tensor_parallel
    products = element_bytes * tokens * (widths + hidden / sequence_shards)
    return products + attention_output() + 4 * tokens * num_heads / tensor_parallel


def exchanged_tokens() -> Expr:
    """Return routed tokens as they leave and come back, for policies that keep communication."""
    return 2 * element_bytes * routed_tokens * hidden


def linear_operands() -> Expr:
    """Return inputs and output gradients of linear layers: all that their weights' gradients need.

    Column-parallel layers have the norm outputs and the gradients of queries, keys, values and of
    the activation's input; row-parallel ones theirs, and whole gradients of the residual stream.
    """
    gradients = 2 * element_bytes * tokens * hidden
    hidden_gradients = element_bytes * tokens * ffn_width / tensor_parallel * ffn_inputs
    of_attention = latents() + queries_keys_values() + attention_output()
    return 2 * norm_outputs() + of_attention + hidden_gradients + ffn_activation() + gradients


def backward_transient() -> Expr:
    """Return gradients alive at once while the feed-forward block or its experts run backward.

    The gradient of the hidden tensor beside those of the residual stream. Answers of experts
    that were kept, and the output of the activation, are gone when the gradient of the activation's
    input comes.
    """
    dense = element_bytes * tokens * ffn_width / tensor_parallel * ffn_inputs
    width = expert_width / expert_tensor_parallel * ffn_inputs
    experts = element_bytes * routed_tokens * (width + hidden)
    gone = element_bytes * routed_tokens * released_width / expert_tensor_parallel
    experts = experts - gone - expert_answers()
    return _residual_gradients() + Maximum(dense, experts)


def attention_transient() -> Expr:
    """Return gradients alive at once while attention runs backward."""
    keys_values = (key_width + value_width) / key_value_shards
    widths = query_width / tensor_parallel + keys_values + output_width / tensor_parallel
    scores = score_gradient_bytes * tokens * key_length * num_heads / tensor_parallel
    return _residual_gradients() + Maximum(element_bytes * tokens * widths, scores)


def answers_transient() -> Expr:
    """Return gradients alive at once where experts' answers are weighed, before their matrices run.

    Answers that were kept meet their gradient and, before it is summed, that of their weights.
    """
    return _residual_gradients() + 2 * expert_answers()


def _residual_gradients() -> Expr:
    """Return two gradients of the residual stream, re-gathered where the sequence is cut."""
    stream = element_bytes * tokens * hidden / sequence_shards
    return 2 * stream + 2 * element_bytes * tokens * hidden * (1 - 1 / sequence_shards)


def formulas() -> tuple[Formula, ...]:
    """Return the formulas of this module."""
    parts = (
        layer_input,
        norm_inputs,
        norm_copies,
        norm_outputs,
        latents,
        queries_keys_values,
        qk_norm_inputs,
        attention_scores,
        attention_output,
        ffn_hidden,
        ffn_activation,
        routing,
        expert_inputs,
        expert_hidden,
        expert_activation,
        expert_answers,
        alternate_operations,
        exchanged_tokens,
        linear_operands,
        backward_transient,
        attention_transient,
        answers_transient,
    )
    return (
        Formula(
            name="layer_activations",
            summary="Bytes that one layer and micro-batch keep on a rank, by what keeps them.",
            results=tuple((part.__name__, part()) for part in parts),
        ),
    )
