"""What one layer keeps for backward on one rank: the formulas with the sizes of a job."""

import numpy as np
from numpy.typing import NDArray

from costmodels.compiled.activations import LayerActivations, layer_activations
from costmodels.job import Precision, TrainingJob
from costmodels.layout_table import LayoutTable
from costmodels.memory.weight_bytes import LOW_PRECISIONS
from costmodels.model import LayerKind, ModelSpec
from costmodels.network.attention import attention_kernel
from costmodels.targets import BEHAVIOURS, FrameworkBehaviour

Column = NDArray[np.float64]

# Kept per attention score. A fused softmax keeps its 16-bit output; a softmax of torch keeps an
# fp32 one and its 16-bit cast for the product with the values.
SCORE_BYTES = {"flash-1": 0, "flash-2": 0, "fused-softmax": 2, "torch-softmax": 6}
# Gradients of probabilities and of scores, alive at once in backward: both in 16 bits, or in fp32.
SCORE_GRADIENT_BYTES = {"fused-softmax": 4, "torch-softmax": 8}
# GPT-2's published training drops attention probabilities and block outputs (0.1 each): unfused
# kernels keep a mask byte and the dropped probabilities; blocks keep a mask byte per value. Flash
# attention draws the mask again; stacks that have it train without the other.
DROPOUT_SCORE_BYTES = 3
# An unfused norm keeps its input in fp32 and the scaled 16-bit value before the weight.
UNFUSED_NORM_BYTES = 6
# Per token and expert: fp32 scores, fp32 probabilities, a boolean map, and 16-bit logits.
ROUTER_BYTES = 11
# chosen: the fullest expert-parallel rank beyond its fair share where routing is not evened out.
EXPERT_IMBALANCE = 1.2


def element_bytes(job: TrainingJob) -> int:
    """Return the bytes of one activation value."""
    return 4 if job.precision is Precision.FP32 else 2


def tokens_per_rank(job: TrainingJob, table: LayoutTable) -> Column:
    """Return the tokens of a micro-batch on one rank, before sequence parallelism."""
    return np.asarray(table.micro_batch_size * job.seq_len / table.context_parallel)


def layer_parts(
    model: ModelSpec, job: TrainingJob, kind: LayerKind, table: LayoutTable
) -> LayerActivations:
    """Return what a layer keeps, by what keeps it.

    Args:
        model: The network.
        job: Sequence length, precision, kernels, target.
        kind: Dense or experts.
        table: Layouts.

    """
    behaviour = BEHAVIOURS[job.target]
    latent, moe = model.latent_attention, model.moe if kind.has_experts else None
    heads = model.num_attention_heads
    tensor = table.tensor_parallel
    tokens = tokens_per_rank(job, table)
    sequence_shards = np.where(table.sequence_parallel == 1, tensor, 1)
    # Tensor ranks never send a token twice: each routes its own part, also of whole sequences.
    routed = tokens / tensor * table.expert_tensor_parallel
    answers = moe.experts_per_token if moe and behaviour.keeps_expert_answers else 0
    answered = tokens / tensor * answers
    ffn_width = model.ffn_hidden_size if moe is None else moe.shared_ffn_hidden_size
    value_dim = latent.v_head_dim if latent else model.head_dim
    key_dim = latent.qk_head_dim if latent else model.head_dim
    key_heads = heads if latent else model.num_kv_heads
    qk_widths = {"none": 0, "per-head": (heads + model.num_kv_heads) * model.head_dim}
    qk_widths["full"] = qk_widths["per-head"]
    bytes_of_input = _input_bytes(job, behaviour)
    return layer_activations(
        tokens=tokens,
        key_length=job.seq_len,
        element_bytes=element_bytes(job),
        input_bytes=bytes_of_input,
        hidden=model.hidden_size,
        tensor_parallel=tensor,
        sequence_shards=sequence_shards,
        input_shards=1 if behaviour.saves_gathered_input else sequence_shards,
        num_heads=heads,
        query_width=heads * key_dim,
        key_width=key_heads * key_dim,
        value_width=key_heads * value_dim,
        output_width=heads * value_dim,
        key_value_shards=np.minimum(tensor, key_heads),
        latent_width=_latent_width(model, sequence_shards if behaviour.gathers_late else 1),
        num_input_norms=1 if model.parallel_block else 2,
        num_output_norms=max(model.norms_per_layer - 2, 0),
        norm_copy_bytes=0 if job.switches.fused_norm else UNFUSED_NORM_BYTES,
        qk_norm_width=qk_widths[model.qk_norm],
        score_bytes=_score_bytes(model, job),
        score_gradient_bytes=SCORE_GRADIENT_BYTES.get(attention_kernel(job), 0),
        ffn_width=ffn_width,
        ffn_inputs=2 if model.gated_ffn else 1,
        ffn_copies=_gate_copies(model, job, behaviour),
        num_experts=moe.num_experts if moe else 0,
        router_bytes=ROUTER_BYTES * sequence_shards / tensor,
        routed_tokens=routed * (moe.experts_per_token * _imbalance(job, table) if moe else 0),
        answered_tokens=answered,
        expert_width=moe.ffn_hidden_size if moe else 0,
        released_width=moe.ffn_hidden_size if answers and moe else 0,
        expert_tensor_parallel=table.expert_tensor_parallel,
    )


def _latent_width(model: ModelSpec, shards_before: Column | int) -> Column | float:
    """Return compressed queries, keys and values, before their norms (cut) and after them."""
    latent = model.latent_attention
    if latent is None:
        return 0
    after = (latent.q_lora_rank or 0) + latent.kv_lora_rank
    return (after + latent.qk_rope_head_dim) / shards_before + after


def _input_bytes(job: TrainingJob, behaviour: FrameworkBehaviour) -> int:
    is_low = job.precision in LOW_PRECISIONS and behaviour.low_precision_inputs
    return 1 if is_low else element_bytes(job)


def _score_bytes(model: ModelSpec, job: TrainingJob) -> int:
    """Return what attention keeps per score; nothing with a flash kernel."""
    kept = SCORE_BYTES.get(attention_kernel(job), 0)
    drops = kept > 0 and model.architecture == "gpt2"
    return kept + (DROPOUT_SCORE_BYTES if drops else 0)


def _gate_copies(model: ModelSpec, job: TrainingJob, behaviour: FrameworkBehaviour) -> int:
    fused = not behaviour.unfused_gate or (behaviour.compiled_gate and bool(job.switches.compile))
    return 1 if model.gated_ffn and not fused else 0


def _imbalance(job: TrainingJob, table: LayoutTable) -> Column:
    """Return the fullest rank's share of routed tokens over the fair one."""
    factor = 1.0 if job.switches.balanced_routing else EXPERT_IMBALANCE
    return np.where(table.expert_parallel > 1, factor, 1.0)
