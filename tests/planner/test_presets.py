"""Presets and model files; published counts from tests/golden/param_counts.csv.

The counts were taken with Hugging Face transformers 5.24 on the meta device from the configs on
the hub; tied weights count once.
"""

import csv
import json
from pathlib import Path

import pytest

from costmodels.model import ModelSpec
from costmodels.parameters import (
    embedding_parameters,
    head_parameters,
    layer_parameters,
    num_active_parameters,
    num_parameters,
)
from planner.codec import decode, encode
from planner.presets import ModelFunctionReference, presets, read_model

GOLDEN = Path(__file__).parents[1] / "golden" / "param_counts.csv"
with GOLDEN.open(encoding="utf-8", newline="") as file:
    PUBLISHED = list(csv.DictReader(file))

PLAIN_SIZES = {
    "1b": "Llama-3.2-1B",
    "3b": "Llama-3.2-3B",
    "7b": "Llama-2-7B",
    "8b": "Llama-3.1-8B",
    "13b": "Llama-2-13B",
    "34b": "Yi-34B",
    "70b": "Llama-3.1-70B",
    "175b": "GPT-3-175B",
    "405b": "Llama-3.1-405B",
}


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row["name"])
def test_preset_counts_equal_the_published_ones(row: dict[str, str]) -> None:
    model = read_model(row["name"].lower())
    assert num_parameters(model) == int(row["total_params"])
    assert num_active_parameters(model) == int(row["active_params_per_token"])
    assert embedding_parameters(model) == int(row["input_embedding_params"])
    norm = model.hidden_size * (2 if model.norm == "layernorm" else 1)
    assert head_parameters(model) - norm == int(row["lm_head_params"])
    experts = sum(layer_parameters(model, kind).expert_parameters for kind in model.layer_kinds)
    assert experts == int(row["routed_expert_params"])


def test_the_golden_table_covers_every_preset_with_a_published_count() -> None:
    counted = {row["name"] for row in PUBLISHED}
    own = {"GPT-3-175B", "Llama-3.2-3B", "tiny", "tiny-moe", "20m", "60m"}
    assert {preset.name for preset in presets()} == counted | own
    assert len(counted) == 31


@pytest.mark.parametrize(("size", "name"), PLAIN_SIZES.items())
def test_plain_sizes_stand_for_one_model_each(size: str, name: str) -> None:
    assert read_model(size).name == name
    assert read_model(size) == read_model(name.lower())


def test_every_preset_reads_back_from_its_json() -> None:
    for preset in presets():
        model = read_model(preset.name)
        assert decode(ModelSpec, json.loads(json.dumps(encode(model))), "model") == model


def test_names_are_unique_and_every_preset_says_where_it_comes_from() -> None:
    names = [name for preset in presets() for name in preset.names]
    assert len(names) == len(set(names))
    assert all(preset.source for preset in presets())


def test_gpt_3_has_the_shape_of_its_paper() -> None:
    model = read_model("175b")
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (96, 12288, 96)
    block = (
        12 * 12288**2 + 13 * 12288
    )  # four attention and eight feed-forward squares; biases, norms
    assert num_parameters(model) == 96 * block + (50257 + 2048) * 12288 + 2 * 12288


def test_llama_3_2_3b_has_its_published_count() -> None:
    assert num_parameters(read_model("3b")) == 3_212_749_824  # hub weights index


@pytest.mark.parametrize(("name", "low", "high"), [("20m", 18e6, 22e6), ("60m", 54e6, 66e6)])
def test_models_for_cpus_are_as_large_as_they_say(name: str, low: float, high: float) -> None:
    model = read_model(name)
    assert low <= num_parameters(model) <= high
    assert model.num_kv_heads < model.num_attention_heads
    assert model.num_layers >= 8
    assert model.vocab_size >= 256


def test_tiny_is_under_a_million_weights_with_eight_layers() -> None:
    model = read_model("tiny")
    assert num_parameters(model) < 1_000_000
    assert model.num_layers == 8
    assert model.num_kv_heads < model.num_attention_heads


def test_tiny_moe_is_tiny_with_experts_in_every_layer() -> None:
    plain, routed = read_model("tiny"), read_model("tiny-moe")
    assert num_active_parameters(routed) < num_parameters(plain) < num_parameters(routed)
    assert all(kind.has_experts for kind in routed.layer_kinds)
    assert (routed.hidden_size, routed.num_layers) == (plain.hidden_size, plain.num_layers)


def llama_config(**changes: object) -> dict[str, object]:
    return {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "max_position_embeddings": 128,
        "vocab_size": 1000,
    } | changes


def test_a_config_and_the_folder_that_holds_it_are_the_same_model(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(llama_config()), encoding="utf-8")
    assert read_model(str(folder)) == read_model(str(folder / "config.json"))
    assert read_model(str(folder)).name == "mine"


def test_a_config_of_another_name_lends_the_model_its_own(tmp_path: Path) -> None:
    path = tmp_path / "Mine-1B.json"
    path.write_text(json.dumps(llama_config()), encoding="utf-8")
    assert read_model(str(path)).name == "Mine-1B"


TOML = """
hidden_size = 64
num_layers = 2
num_attention_heads = 8
ffn_hidden_size = 160
vocab_size = 1000
training_seq_len = 128
"""


def toml_model(tmp_path: Path, text: str) -> ModelSpec:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return read_model(str(path))


def test_a_model_toml_fills_in_what_follows_from_the_rest(tmp_path: Path) -> None:
    model = toml_model(tmp_path, TOML)
    assert (model.name, model.architecture) == ("mine", "llama")
    assert (model.num_kv_heads, model.head_dim) == (8, 8)


def test_a_model_toml_describes_experts_latent_attention_and_rope(tmp_path: Path) -> None:
    model = toml_model(
        tmp_path,
        TOML
        + """
[moe]
num_experts = 4
experts_per_token = 2
ffn_hidden_size = 32
[latent_attention]
kv_lora_rank = 16
q_lora_rank = 24
qk_nope_head_dim = 12
qk_rope_head_dim = 4
v_head_dim = 10
[rope_scaling]
rope_type = "yarn"
factor = 4.0
""",
    )
    assert model.moe is not None
    assert model.moe.num_experts == 4
    assert model.latent_attention is not None
    assert model.latent_attention.qk_head_dim == 16
    assert dict(model.rope_scaling) == {"factor": 4.0, "rope_type": "yarn"}


def test_learned_positions_and_a_base_of_zero_mean_no_rotary_positions(tmp_path: Path) -> None:
    assert toml_model(tmp_path, TOML).rope_theta == 10000
    assert toml_model(tmp_path, TOML + "num_position_embeddings = 128\n").rope_theta is None
    assert toml_model(tmp_path, TOML + "rope_theta = 0\n").rope_theta is None
    both = toml_model(tmp_path, TOML + "num_position_embeddings = 128\nrope_theta = 5e5\n")
    assert both.rope_theta == 5e5
    assert read_model("175b").rope_theta is None


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (TOML + "num_heads = 8\n", "num_heads"),
        (TOML.replace("num_layers = 2\n", ""), "num_layers"),
        (TOML.replace("64", '"64"'), "hidden_size"),
        (TOML.replace("64", "65"), "hidden_size 65 is no multiple"),
        (TOML + "num_kv_heads = 3\n", "num_kv_heads must divide"),
        (TOML + "qkv_bias = 1\n", "qkv_bias"),
        (TOML + "norm_epsilon = nan\n", "norm_epsilon"),
        (TOML + "[moe]\nnum_experts = 4\n", "experts_per_token"),
        ("hidden_size = ", "mine.toml"),
    ],
)
def test_a_senseless_model_toml_is_refused_by_key(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=r"mine\.toml") as caught:
        toml_model(tmp_path, text)
    assert fault in str(caught.value)


def test_a_function_reference_is_told_apart() -> None:
    with pytest.raises(ModelFunctionReference) as caught:
        read_model("package.module:build")
    assert (caught.value.module, caught.value.function) == ("package.module", "build")


def test_an_unknown_name_is_answered_with_the_nearest_presets() -> None:
    with pytest.raises(ValueError, match=r"no model 'lama-3\.1-8b'") as caught:
        read_model("lama-3.1-8b")
    assert "nearest: llama-3.1-8b" in str(caught.value)
    assert "mixtral-8x7b" in str(caught.value)


@pytest.mark.parametrize("text", ["", "a\0b", "x" * 5000, ":", "a:b:c", "no/such-model.json"])
def test_text_that_names_nothing_is_one_message(text: str) -> None:
    with pytest.raises(ValueError, match="no model"):
        read_model(text)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ('{"model_type": "llama", "hidden_size": ', "not valid JSON"),
        ('["llama"]', "must hold a JSON object, not a list"),
        ('{"model_type": "llama", "model_type": "gpt2"}', "model_type"),
        ('{"model_type": "llama", "hidden_size": NaN}', "NaN"),
        ("", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("1" * 5000, "model.json"),
        (" " * (5 * 2**20), "larger than 4 MiB"),
    ],
    ids=["cut", "list", "repeated", "nan", "empty", "deep", "digits", "huge"],
)
def test_a_file_that_is_no_config_is_refused_by_name(
    tmp_path: Path, content: str, fault: str
) -> None:
    path = tmp_path / "model.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"model\.json") as caught:
        read_model(str(path))
    assert fault in str(caught.value)


def test_bytes_that_are_no_text_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"model\.json"):
        read_model(str(path))


def test_a_folder_without_a_config_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        read_model(str(tmp_path))


def test_a_device_is_no_model() -> None:
    with pytest.raises(ValueError, match="no regular file"):
        read_model("/dev/zero")
