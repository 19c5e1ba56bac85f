"""What the model's shape allows: heads, widths, layers, experts and tokens against the degrees.

Sources: Megatron-LM `arguments.py`, torchtitan `parallel_dims.py` and the DeepSpeed-Ulysses paper
(arXiv:2309.14509, section 3); tensor cores read low-precision numbers in blocks (NVIDIA
Transformer Engine user guide, "FP8 primer": dimensions divisible by 16; MXFP8 scales blocks of 32).
"""

import numpy as np

from costmodels.layout import ContextParallelType
from costmodels.layout_table import CONTEXT_PARALLEL_TYPES, IntColumn
from planner.rules.rule import WIDTH_BLOCKS, Case, Mask, Rule, token_block

ULYSSES = CONTEXT_PARALLEL_TYPES.index(ContextParallelType.ULYSSES)


def _dense_width(case: Case) -> int:
    """Width of the feed-forward block that the tensor axis cuts; 0 where all are routed experts."""
    moe = case.model.moe
    if moe is None or moe.num_dense_layers > 0:
        return case.model.ffn_hidden_size
    return moe.shared_ffn_hidden_size


def _divides_experts(case: Case) -> Mask:
    moe = case.model.moe
    if moe is None:
        return np.asarray(case.table.expert_parallel == 1, dtype=np.bool_)
    return np.asarray(moe.num_experts % case.table.expert_parallel == 0, dtype=np.bool_)


def _divides_expert_width(case: Case) -> Mask:
    moe = case.model.moe
    if moe is None:
        return np.asarray(case.table.expert_tensor_parallel == 1, dtype=np.bool_)
    return np.asarray(moe.ffn_hidden_size % case.table.expert_tensor_parallel == 0, dtype=np.bool_)


def _sequence_divides(case: Case) -> Mask:
    table = case.table
    by_tensor = np.where(case.splits_sequence_by_tensor, table.tensor_parallel, 1)
    causal = (table.context_parallel > 1) & (table.context_parallel_type != ULYSSES)
    # Causal rings give each rank two slices, one early and one late, so that all work alike.
    pieces = np.where(causal, 2, 1) * table.context_parallel * by_tensor
    return np.asarray(case.job.seq_len % pieces == 0, dtype=np.bool_)


def _ulysses_divides_heads(case: Case) -> Mask:
    table = case.table
    ranks = table.context_parallel * table.tensor_parallel
    kv_heads = case.model.num_kv_heads
    heads_divide = case.model.num_attention_heads % ranks == 0
    kv_fit = (kv_heads % ranks == 0) | (ranks % kv_heads == 0)
    return np.asarray(
        (table.context_parallel_type != ULYSSES) | (ranks == 1) | (heads_divide & kv_fit),
        dtype=np.bool_,
    )


def _blocks_divide(case: Case) -> Mask:
    block = WIDTH_BLOCKS.get(case.job.precision)
    if block is None:
        return case.always(holds=True)
    return np.asarray(
        np.logical_and.reduce([width % block == 0 for width in _widths(case)]), dtype=np.bool_
    )


def _token_blocks_divide(case: Case) -> Mask:
    tokens = case.table.micro_batch_size * case.job.seq_len // case.table.context_parallel
    return np.asarray(tokens % token_block(case.job) == 0, dtype=np.bool_)


def _widths(case: Case) -> list[IntColumn]:
    """Sizes of one rank's weights along every cut dimension."""
    model, table = case.model, case.table
    tensor = table.tensor_parallel
    heads = model.num_attention_heads * model.head_dim // tensor
    kv_heads = np.maximum(model.num_kv_heads // tensor, 1) * model.head_dim
    dims = [np.full(len(table), model.hidden_size), heads, kv_heads]
    width = _dense_width(case)
    if width:
        dims.append(width // tensor)
    if model.moe is not None:
        dims.append(model.moe.ffn_hidden_size // table.expert_tensor_parallel)
    return dims


STAGES_HOLD_LAYERS = Rule(
    name="stages_hold_layers",
    reads=("pipeline_parallel", "stages_per_rank"),
    holds=lambda case: case.num_stages <= case.model.num_layers,
    says="{num_stages} stages (--pp {pipeline_parallel} x --stages-per-rank "
    "{stages_per_rank}) are more than the {num_layers} layers of {model}",
    given=("pipeline_parallel", "stages_per_rank", "num_layers"),
    blames=("pipeline_parallel", "stages_per_rank"),
)
SHAPE_RULES: tuple[Rule, ...] = (
    Rule(
        name="tensor_parallel_divides_heads",
        reads=("tensor_parallel",),
        holds=lambda case: case.model.num_attention_heads % case.table.tensor_parallel == 0,
        says="tensor parallel {tensor_parallel} (--tp) does not divide the {num_attention_heads} "
        "attention heads of {model}",
        given=("tensor_parallel", "num_attention_heads"),
        blames=("tensor_parallel",),
    ),
    Rule(
        name="tensor_parallel_divides_ffn",
        reads=("tensor_parallel",),
        holds=lambda case: _dense_width(case) % case.table.tensor_parallel == 0,
        says="tensor parallel {tensor_parallel} (--tp) does not divide the feed-forward width "
        "{ffn_hidden_size} of {model}",
        given=("tensor_parallel", "ffn_hidden_size"),
        blames=("tensor_parallel",),
    ),
    STAGES_HOLD_LAYERS,
    Rule(
        name="sequence_divides",
        reads=(
            "context_parallel",
            "context_parallel_type",
            "tensor_parallel",
            "sequence_parallel",
        ),
        holds=_sequence_divides,
        says="a sequence of {seq_len} tokens (--seq-len) is not a multiple of {sequence_multiple}, "
        "which context parallel {context_parallel} ({context_parallel_type}) and tensor parallel "
        "{tensor_parallel} with sequence parallelism {sequence_parallel} ask for",
        given=("seq_len", "context_parallel", "tensor_parallel", "sequence_multiple"),
        blames=("context_parallel", "tensor_parallel", "seq_len"),
    ),
    Rule(
        name="ulysses_divides_heads",
        reads=("context_parallel", "context_parallel_type", "tensor_parallel"),
        holds=_ulysses_divides_heads,
        says="Ulysses spreads heads over context parallel {context_parallel} x tensor parallel "
        "{tensor_parallel}, which must divide the {num_attention_heads} heads and divide or be a "
        "multiple of the {num_kv_heads} key-value heads of {model}",
        given=("context_parallel", "tensor_parallel", "num_attention_heads", "num_kv_heads"),
        blames=("context_parallel", "context_parallel_type", "tensor_parallel"),
    ),
    Rule(
        name="expert_parallel_divides_experts",
        reads=("expert_parallel",),
        holds=_divides_experts,
        says="expert parallel {expert_parallel} (--ep) does not divide the {num_experts} experts "
        "of {model}",
        given=("expert_parallel", "num_experts"),
        blames=("expert_parallel",),
    ),
    Rule(
        name="expert_tensor_parallel_divides_experts",
        reads=("expert_tensor_parallel",),
        holds=_divides_expert_width,
        says="expert tensor parallel {expert_tensor_parallel} (--etp) does not divide the expert "
        "width {expert_ffn_hidden_size} of {model}",
        given=("expert_tensor_parallel", "expert_ffn_hidden_size"),
        blames=("expert_tensor_parallel",),
    ),
    Rule(
        name="low_precision_blocks_divide",
        reads=("tensor_parallel", "expert_tensor_parallel"),
        holds=_blocks_divide,
        says="{precision} (--precision) reads {width_block} numbers at once, which do not divide "
        "every width that tensor parallel {tensor_parallel} (--tp) and expert tensor parallel "
        "{expert_tensor_parallel} (--etp) leave a rank of {model}: hidden size {hidden_size}, "
        "{num_attention_heads} and {num_kv_heads} heads, feed-forward {ffn_hidden_size}",
        given=("precision", "tensor_parallel", "expert_tensor_parallel", "width_block"),
        blames=("tensor_parallel", "precision"),
    ),
    Rule(
        name="low_precision_blocks_divide_tokens",
        reads=("micro_batch_size", "context_parallel"),
        holds=_token_blocks_divide,
        says="{precision} (--precision) takes tokens in multiples of {token_block}; micro-batch "
        "{micro_batch_size} (--mbs) x {seq_len} (--seq-len) / context parallel {context_parallel} "
        "(--cp) = {rank_tokens} tokens",
        given=("precision", "rank_tokens", "token_block", "seq_len"),
        blames=("micro_batch_size", "context_parallel", "precision"),
    ),
)

KV_HEADS_DIVIDE = Rule(
    name="tensor_parallel_divides_kv_heads",
    reads=("tensor_parallel",),
    holds=lambda case: case.model.num_kv_heads % case.table.tensor_parallel == 0,
    says="tensor parallel {tensor_parallel} (--tp) does not divide the {num_kv_heads} key-value "
    "heads of {model}; {target} does not copy them",
    given=("tensor_parallel", "num_kv_heads"),
    blames=("tensor_parallel",),
)
