"""Activations against arithmetic by hand, and laws that hold for every layout."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.job import Precision, Switches, Target, TrainingJob
from costmodels.layout import Layout, Recompute
from costmodels.layout_table import table_of
from costmodels.memory.activations import layer_bytes
from costmodels.memory.head import head_bytes
from costmodels.model import LatentAttention, LayerKind, MixtureOfExperts, ModelSpec
from costmodels.network.shard import padded_rows

DENSE = LayerKind(window=None, has_experts=False)
ROUTED = LayerKind(window=None, has_experts=True)
LLAMA_70B = ModelSpec(
    name="llama-70b",
    architecture="llama",
    hidden_size=8192,
    num_layers=80,
    num_attention_heads=64,
    num_kv_heads=8,
    head_dim=128,
    ffn_hidden_size=28672,
    vocab_size=128256,
    training_seq_len=8192,
)
GPT = ModelSpec(
    name="gpt-1.3b",
    architecture="gpt2",
    hidden_size=2048,
    num_layers=24,
    num_attention_heads=16,
    num_kv_heads=16,
    head_dim=128,
    ffn_hidden_size=8192,
    vocab_size=50304,
    training_seq_len=2048,
    gated_ffn=False,
    activation="gelu",
    norm="layernorm",
)
DEEPSEEK_V2 = replace(
    LLAMA_70B,
    hidden_size=5120,
    num_attention_heads=128,
    num_kv_heads=128,
    ffn_hidden_size=12288,
    latent_attention=LatentAttention(
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    ),
    moe=MixtureOfExperts(
        num_experts=160,
        experts_per_token=6,
        ffn_hidden_size=1536,
        shared_ffn_hidden_size=3072,
        num_dense_layers=1,
    ),
)


def job(target=Target.MEGATRON, seq_len=4096, **changes):
    return TrainingJob(seq_len=seq_len, global_batch_size=8, target=target, **changes)


def kept(model, what, kind=DENSE, modules=(), **axes):
    layout = Layout(layers_per_stage=(model.num_layers,), **axes)
    return float(layer_bytes(model, what, kind, table_of([layout]), modules).kept[0])


def test_a_gated_layer_with_grouped_heads_and_flash_attention_by_hand():
    stream, keys, queries, width = 2 * 8192, 2 * 1024, 2 * 8192, 2 * 28672
    per_token = 4 * stream + queries + 2 * keys + queries + 4 * 64 + 3 * width
    assert kept(LLAMA_70B, job()) == 4096 * per_token


def test_tensor_and_sequence_parallelism_divide_everything_where_inputs_are_gathered_again():
    cut = kept(LLAMA_70B, job(), tensor_parallel=8, sequence_parallel=True)
    assert cut == kept(LLAMA_70B, job()) / 8


def test_without_sequence_parallelism_norms_stay_whole():
    stream = 2 * 4096 * 8192
    whole, cut = kept(LLAMA_70B, job()), kept(LLAMA_70B, job(), tensor_parallel=8)
    assert cut == (whole - 4 * stream) / 8 + 4 * stream


def test_a_runtime_that_saves_gathered_inputs_keeps_two_whole_streams():
    axes = {"tensor_parallel": 8, "sequence_parallel": True}
    saved = kept(LLAMA_70B, job(Target.NANOTRON, switches=Switches(compile=True)), **axes)
    gathered_again = kept(LLAMA_70B, job(), **axes)
    assert saved - gathered_again == 2 * (1 - 1 / 8) * 2 * 4096 * 8192


def test_an_eager_gate_keeps_its_activated_half():
    eager = kept(LLAMA_70B, job(Target.DEEPSPEED))
    assert eager - kept(LLAMA_70B, job()) == 2 * 4096 * 28672


def test_korthikanti_holds_for_gpt_with_unfused_attention_and_dropout_of_probabilities():
    what = job(seq_len=2048, flash_attention=False, precision=Precision.FP16)
    tokens = scores = 2048
    # sbh (34 - 2 dropout masks of 1 byte) + 5 a s^2, and the log-sum-exp's room of 4 a s.
    by_hand = tokens * 2048 * 32 + 5 * 16 * tokens * scores + 4 * 16 * tokens
    assert kept(GPT, what) == by_hand


def test_a_softmax_of_torch_keeps_fp32_probabilities_and_their_cast():
    def scores_of(kernel):
        switches = Switches(attention_kernel=kernel)
        return kept(LLAMA_70B, job(flash_attention=kernel == "flash-2", switches=switches))

    scores = 64 * 4096 * 4096
    assert scores_of("fused-softmax") - scores_of("flash-2") == 2 * scores
    assert scores_of("torch-softmax") - scores_of("flash-2") == 6 * scores


def test_an_unfused_norm_keeps_six_bytes_more_per_value():
    plain = kept(LLAMA_70B, job(switches=Switches(fused_norm=False)))
    assert plain - kept(LLAMA_70B, job()) == 2 * 6 * 4096 * 8192


def test_a_latent_dense_layer_by_hand():
    per_token = (
        4 * 2 * 5120
        + 2 * (2 * 1536 + 2 * 512 + 64)
        + 2 * 128 * (192 + 192 + 128)
        + 2 * 128 * 128
        + 4 * 128
        + 3 * 2 * 12288
    )
    assert kept(DEEPSEEK_V2, job()) == 4096 * per_token


def test_experts_keep_each_tokens_copies_and_the_shared_block():
    switches = Switches(balanced_routing=True)
    with_experts = kept(DEEPSEEK_V2, job(switches=switches), ROUTED)
    dense = kept(DEEPSEEK_V2, job(switches=switches))
    copies = 6 * (2 * 5120 + 3 * 2 * 1536)
    shared_less_dense = 3 * 2 * (3072 - 12288)
    assert with_experts - dense == 4096 * (copies + shared_less_dense + 11 * 160)


def test_uneven_routing_keeps_more_only_where_experts_are_spread():
    even = job(switches=Switches(balanced_routing=True))
    assert kept(DEEPSEEK_V2, job(), ROUTED) == kept(DEEPSEEK_V2, even, ROUTED)
    spread = {"data_parallel": 8, "expert_parallel": 8}
    assert kept(DEEPSEEK_V2, job(), ROUTED, **spread) > kept(DEEPSEEK_V2, even, ROUTED, **spread)


def test_full_recomputation_keeps_the_input_alone():
    layout = Layout(layers_per_stage=(80,), recompute=Recompute.FULL)
    layer = layer_bytes(LLAMA_70B, job(), DENSE, table_of([layout]))
    assert float(layer.recomputed[0]) == 2 * 4096 * 8192
    assert float(layer.everything[0]) == kept(LLAMA_70B, job())


def test_recomputing_the_attention_core_saves_next_to_nothing_with_flash_attention():
    whole = kept(LLAMA_70B, job())
    saved = whole - kept(LLAMA_70B, job(), recompute=Recompute.SELECTIVE)
    assert saved == 4 * 64 * 4096
    assert saved < 0.001 * whole


@pytest.mark.parametrize(
    ("module", "per_token"),
    [
        ("mlp", 2 * 8192 + 3 * 2 * 28672),
        ("layernorm", 2 * 2 * 8192),
        ("core_attn", 4 * 64),
    ],
)
def test_each_module_drops_what_it_can_compute_again(module, per_token):
    rest = kept(LLAMA_70B, job(), modules=(module,), recompute=Recompute.SELECTIVE)
    assert kept(LLAMA_70B, job()) - rest == 4096 * per_token


def test_the_per_operation_policy_keeps_every_second_product_and_attention():
    what = job(Target.TORCHTITAN)
    per_token = 2 * (8192 + 8192 + 1024 + 28672 + 8192 + 8192) + 4 * 64
    assert kept(LLAMA_70B, what, recompute=Recompute.SELECTIVE) == 4096 * per_token


def test_an_unknown_module_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'moe_gate' is not known; choose from core_attn, mlp"):
        kept(LLAMA_70B, job(), modules=("moe_gate",), recompute=Recompute.SELECTIVE)


def test_fp8_products_of_megatron_keep_one_byte_inputs():
    saved = kept(LLAMA_70B, job()) - kept(LLAMA_70B, job(precision=Precision.FP8))
    assert saved == 4096 * (2 * 8192 + 28672)


def test_logits_of_a_fused_loss_are_cut_by_the_tensor_axis():
    table = table_of([Layout(tensor_parallel=t, layers_per_stage=(80,)) for t in (1, 2)])
    head = head_bytes(replace(LLAMA_70B, vocab_size=131072), job(), table)
    assert head.peak.tolist() == [6 * 4096 * 131072, 6 * 4096 * 131072 / 2]
    assert head.norm.tolist() == [2 * 2 * 4096 * 8192] * 2


def test_a_loss_of_torch_works_on_whole_rows_on_every_tensor_rank():
    table = table_of([Layout(tensor_parallel=8, layers_per_stage=(80,))])
    switches = Switches(fused_cross_entropy=False)
    head = head_bytes(LLAMA_70B, job(Target.DEEPSPEED, switches=switches), table)
    assert float(head.peak[0]) == 18 * 4096 * 128256


@pytest.mark.parametrize(
    ("target", "bytes_per_logit"), [(Target.ACCELERATE, 12), (Target.MEGATRON, 6)]
)
def test_the_loss_that_hugging_faces_models_bring_is_eager(target, bytes_per_logit):
    table = table_of([Layout(layers_per_stage=(80,))])
    logits = 4096 * padded_rows(LLAMA_70B, job(target).target, np.array([1]))[0]
    assert float(head_bytes(LLAMA_70B, job(target), table).peak[0]) == bytes_per_logit * logits
    fused = job(target, switches=Switches(fused_cross_entropy=True))
    assert float(head_bytes(LLAMA_70B, fused, table).peak[0]) <= 6 * logits


def test_a_chunked_loss_never_holds_all_logits():
    table = table_of([Layout(layers_per_stage=(80,))])
    whole, chunked = (
        head_bytes(LLAMA_70B, job(chunked_loss=chunked), table) for chunked in (False, True)
    )
    assert float(chunked.peak[0]) == float(whole.peak[0]) / 8
    assert float(chunked.saved[0]) == 0


@given(
    target=st.sampled_from(list(Target)),
    tensor=st.sampled_from([1, 2, 4, 8]),
    size=st.sampled_from([1, 2, 4]),
    context=st.sampled_from([1, 2, 4]),
    routed=st.booleans(),
)
def test_activations_are_linear_in_tokens(target, tensor, size, context, routed):
    kind = ROUTED if routed else DENSE
    axes = {"tensor_parallel": tensor, "sequence_parallel": tensor > 1}
    whole = kept(DEEPSEEK_V2, job(target), kind, micro_batch_size=1, **axes)
    many = kept(
        DEEPSEEK_V2,
        job(target),
        kind,
        micro_batch_size=size,
        context_parallel=context,
        **axes,
    )
    assert many == pytest.approx(whole * size / context)


@given(
    target=st.sampled_from(list(Target)),
    kind=st.sampled_from([DENSE, ROUTED]),
    flash=st.booleans(),
)
def test_no_policy_keeps_more_than_none_nor_less_than_the_input(target, kind, flash):
    what = job(target, flash_attention=flash)
    none = kept(DEEPSEEK_V2, what, kind)
    selective = kept(DEEPSEEK_V2, what, kind, recompute=Recompute.SELECTIVE)
    assert 2 * 4096 * 5120 <= selective <= none


@pytest.mark.parametrize("target", Target)
def test_a_layout_has_the_same_bytes_alone_and_in_a_table(target):
    latent = LatentAttention(
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )
    sizes = {"num_kv_heads": 64, "head_dim": 192, "ffn_hidden_size": 4096}
    model = replace(LLAMA_70B, latent_attention=latent, **sizes)  # attention is the wider block
    job = TrainingJob(seq_len=4096, global_batch_size=8, target=target)
    layouts = [Layout(layers_per_stage=(80,), recompute=recompute) for recompute in Recompute]
    together = layer_bytes(model, job, DENSE, table_of(layouts))
    for row, layout in enumerate(layouts):
        alone = layer_bytes(model, job, DENSE, table_of([layout]))
        assert together.transient[row] == alone.transient[0]
        assert together.kept[row] == alone.kept[0]
