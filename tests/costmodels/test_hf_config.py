"""Hugging Face configs: what is read, what is refused, and transformers as the oracle."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.config_keys import ConfigKeys
from costmodels.hf_config import spec_from_hf_config
from costmodels.hf_families import FAMILIES
from costmodels.model import ModelSpec
from costmodels.parameters import num_parameters

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": 1000,
}


def read(config: dict[str, Any], **changes: object) -> ModelSpec:
    return spec_from_hf_config(config | changes, name="m", source="config.json")


def refusal(config: dict[str, Any], **changes: object) -> str:
    with pytest.raises(ValueError, match=r"^config\.json: ") as caught:
        read(config, **changes)
    return str(caught.value)


def test_llama_reads_every_size() -> None:
    spec = read(LLAMA)
    assert (spec.hidden_size, spec.num_layers, spec.ffn_hidden_size) == (64, 4, 160)
    assert (spec.num_attention_heads, spec.num_kv_heads, spec.head_dim) == (8, 2, 8)
    assert (spec.vocab_size, spec.training_seq_len, spec.tied_embeddings) == (1000, 128, False)


def test_missing_kv_heads_mean_heads_where_the_family_says_so_and_are_asked_for_elsewhere() -> None:
    config = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    assert read(config).num_kv_heads == 8
    assert "num_key_value_heads is missing" in refusal(config, model_type="mistral")


def test_missing_head_dim_is_derived_or_asked_for() -> None:
    assert read(LLAMA, head_dim=32).head_dim == 32
    assert "head_dim is missing" in refusal(LLAMA, model_type="qwen3")
    assert "hidden_size 65 is no multiple of num_attention_heads 8" in refusal(
        LLAMA, hidden_size=65
    )


@pytest.mark.parametrize(
    "name",
    [key for key in LLAMA if key != "num_key_value_heads"],
)
def test_each_missing_key_is_named(name: str) -> None:
    config = {key: value for key, value in LLAMA.items() if key != name}
    assert f"the key {name} is missing" in refusal(config)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8", [8], 2**31, float("nan"), 8.0])
def test_senseless_counts_are_refused_by_name(value: object) -> None:
    assert "num_attention_heads must" in refusal(LLAMA, num_attention_heads=value)


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), True, "1e4"])
def test_senseless_numbers_are_refused_by_name(value: object) -> None:
    assert "rope_theta must be a number above 0" in refusal(LLAMA, rope_theta=value)


def test_kv_heads_that_do_not_divide_heads_are_refused() -> None:
    assert "num_kv_heads must divide num_attention_heads 8, not 3" in refusal(
        LLAMA, num_key_value_heads=3
    )


def test_unknown_model_type_is_refused_with_the_nearest_known() -> None:
    message = refusal(LLAMA, model_type="lama")
    assert "'lama' is not known (nearest: llama)" in message
    assert "mixtral" in message


@pytest.mark.parametrize(
    "name",
    [
        "num_extra_layers",
        "n_head_groups",
        "num_experts",
        "adapter_size",
        "kv_dim",
        "sliding_window",
        "qkv_bias",
        "mtpLayers",
    ],
)
def test_unknown_keys_that_speak_of_shapes_are_refused(name: str) -> None:
    message = refusal(LLAMA, **{name: 4})
    assert repr(name) in message
    assert "'llama'" in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("transformers_version", "4.0"),
        ("torch_dtype", "bfloat16"),
        ("attention_dropout", 0.1),
        ("bos_token_id", 1),
        ("output_hidden_states", False),
        ("_name_or_path", "x"),
        ("hidden_dropout", 0.0),
        ("quantization_config", {"bits": 4}),
        ("sliding_window", None),
        ("my_note", "anything"),
    ],
)
def test_keys_that_change_no_shape_are_ignored(name: str, value: object) -> None:
    assert read(LLAMA, **{name: value}) == read(LLAMA)


def test_two_spellings_that_disagree_are_refused() -> None:
    config = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_positions": 8, "vocab_size": 50}
    assert read(config, n_embd=16, hidden_size=16).hidden_size == 16
    assert "n_embd is 16 but hidden_size" in refusal(config, n_embd=16, hidden_size=32)


def test_cross_attention_and_encoders_are_refused() -> None:
    assert "is_encoder_decoder must be False, not True" in refusal(LLAMA, is_encoder_decoder=True)
    assert read(LLAMA, is_encoder_decoder=False) == read(LLAMA)


def test_rope_is_read_from_old_and_new_keys_alike() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0}
    old = read(LLAMA, rope_theta=5e5, rope_scaling=scaling)
    new = read(LLAMA, rope_parameters=scaling | {"rope_theta": 5e5})
    assert old == new
    assert old.rope_theta == 5e5
    assert dict(old.rope_scaling) == scaling
    assert read(LLAMA, rope_parameters={"rope_type": "default", "rope_theta": 1e4}) == read(LLAMA)


def test_rope_scaling_is_numbers_and_text() -> None:
    """gpt-oss has a flag in it, Phi-3's longrope has lists."""
    scaling = {"type": "longrope", "truncate": False, "factor": 4, "short_factor": [1.0, 1.5]}
    read_back = dict(read(LLAMA, rope_scaling=scaling).rope_scaling)
    assert read_back == {
        "type": "longrope",
        "truncate": "false",
        "factor": 4.0,
        "short_factor": "[1.0, 1.5]",
    }
    assert type(read_back["factor"]) is float


def test_layer_types_have_to_be_the_pattern_that_is_modelled() -> None:
    config = LLAMA | {"model_type": "gemma2", "head_dim": 8, "sliding_window": 32}
    alternating = ["sliding_attention", "full_attention"] * 2
    assert read(config, layer_types=alternating) == read(config)
    assert [k.window for k in read(config).layer_kinds] == [32, None, 32, None]
    message = refusal(config, layer_types=["full_attention"] * 4)
    assert "layer_types" in message
    assert "layer 0" in message


def test_windows_of_qwen_are_off_unless_switched_on_for_all_layers() -> None:
    config = LLAMA | {"model_type": "qwen2", "sliding_window": 32, "max_window_layers": 2}
    assert read(config).window is None
    assert read(config, use_sliding_window=True, max_window_layers=4).window is None
    assert read(config, use_sliding_window=True, max_window_layers=0).window == 32
    assert "max_window_layers 2 of 4" in refusal(config, use_sliding_window=True)


def test_dense_layers_among_experts_have_to_lead() -> None:
    config = LLAMA | {
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }
    spec = read(config, mlp_only_layers=[0, 1])
    assert [kind.has_experts for kind in spec.layer_kinds] == [False, False, True, True]
    assert "mlp_only_layers" in refusal(config, mlp_only_layers=[1])
    assert "decoder_sparse_step must be 1, not 2" in refusal(config, decoder_sparse_step=2)


@given(
    st.dictionaries(
        st.sampled_from([*LLAMA, "head_dim", "rope_scaling", "layer_types", "tie_word_embeddings"]),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=5)
        | st.lists(st.integers(), max_size=2)
        | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    ),
    st.sampled_from(sorted(FAMILIES)),
)
def test_any_config_is_read_or_refused_with_a_message(
    changes: dict[str, object], model_type: str
) -> None:
    config = LLAMA | changes | {"model_type": model_type}
    try:
        spec = read(config)
    except ValueError as error:
        assert str(error).startswith("config.json: ")  # noqa: PT017  # either outcome is right
    else:
        assert num_parameters(spec) > 0


def test_keys_left_unread_are_found_in_a_stable_order() -> None:
    keys = ConfigKeys({"b_size": 1, "a_size": 2})
    with pytest.raises(ValueError, match="'a_size'"):
        keys.refuse_unread()
    keys.skip("a_size", "b_size")
    keys.refuse_unread()


SMALL: dict[str, list[dict[str, Any]]] = {
    "llama": [LLAMA, LLAMA | {"attention_bias": True, "mlp_bias": True, "head_dim": 16}],
    "mistral": [LLAMA],
    "mixtral": [LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}],
    "qwen2": [LLAMA, LLAMA | {"tie_word_embeddings": True}],
    "qwen2_moe": [
        LLAMA
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [0],
        }
    ],
    "qwen3": [LLAMA | {"head_dim": 16}, LLAMA | {"head_dim": 16, "attention_bias": True}],
    "qwen3_moe": [
        LLAMA
        | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    ],
    "deepseek_v2": [
        LLAMA
        | {
            "num_key_value_heads": 8,
            "q_lora_rank": rank,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 4,
            "v_head_dim": 10,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
        }
        for rank in (None, 24)
    ],
    "gemma": [LLAMA | {"head_dim": 16}],
    "gemma2": [LLAMA | {"head_dim": 16, "sliding_window": 32}],
    "gpt2": [
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 100},
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 9, "n_inner": 8},
    ],
    "gpt_neox": [LLAMA, LLAMA | {"attention_bias": False, "tie_word_embeddings": True}],
    "phi3": [LLAMA | {"pad_token_id": 0}],
    "olmo": [LLAMA],
    "olmo2": [LLAMA],
    "bloom": [{"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100}],
    "falcon": [
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 100}
        | changes
        for changes in (
            {},
            {"new_decoder_architecture": True, "num_kv_heads": 2},
            {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
            {"parallel_attn": False, "multi_query": False, "bias": True, "alibi": True},
        )
    ],
    "gpt_oss": [LLAMA | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}],
}
SMALL["deepseek_v3"] = SMALL["deepseek_v2"]


def test_every_family_has_an_oracle_config() -> None:
    assert set(SMALL) == set(FAMILIES)


@pytest.mark.parametrize(
    ("model_type", "config"),
    [(name, config) for name, configs in sorted(SMALL.items()) for config in configs],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_counts_equal_those_of_transformers(model_type: str, config: dict[str, Any]) -> None:
    """As written, and as transformers writes the config out again."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = {k: v for k, v in config.items() if k != "model_type"}
    if model_type == "gpt_neox":
        config.pop("num_key_value_heads")
    theirs = transformers.CONFIG_MAPPING[model_type](**copy.deepcopy(config))
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(theirs)
    total = sum(parameter.numel() for parameter in network.parameters())
    assert num_parameters(read(config, model_type=model_type)) == total
    assert num_parameters(read(theirs.to_dict())) == total
