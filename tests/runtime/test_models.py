"""The decoders: parameters as the planner counts them, refusals by name, rope by hand."""

import math
from dataclasses import replace

import lowering_models as small
import pytest
import torch

from costmodels.model import MixtureOfExperts
from costmodels.parameters import num_parameters
from planner.presets import read_model
from runtime.models import build_model, rope


@pytest.mark.parametrize("name", ["1b", "8b", "70b", "175b", "qwen3-32b", "20m", "tiny"])
def test_a_preset_has_as_many_weights_as_the_planner_counts(name):
    spec = read_model(name)
    model = build_model(spec, seq_len=min(spec.training_seq_len, 2048))
    assert sum(p.numel() for p in model.parameters()) == num_parameters(spec)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architecture": "bloom"}, "no module for architecture 'bloom'"),
        ({"norms_per_layer": 4}, "4 norms per layer"),
        ({"window": 8}, "sequences of 16 tokens with a window of 8"),
        ({"num_position_embeddings": 8}, "16 tokens with 8 learned positions"),
        ({"rope_scaling": (("rope_type", "dynamic"),)}, "rope_scaling of type 'dynamic'"),
        ({"attention_sinks": True}, "attention sinks"),
    ],
)
def test_what_no_module_computes_is_refused_by_name(change, words):
    with pytest.raises(ValueError, match=words):
        build_model(replace(small.MODELS["llama"], **change), seq_len=16)


def test_experts_in_a_family_without_them_are_refused():
    moe = MixtureOfExperts(num_experts=4, experts_per_token=2, ffn_hidden_size=8)
    with pytest.raises(ValueError, match="experts beside learned positions"):
        build_model(replace(small.MODELS["gpt2"], moe=moe), seq_len=16)


def test_rotation_turns_a_pair_by_position_times_frequency():
    frequencies = rope.inverse_frequencies(4, 100.0, {})
    assert frequencies.tolist() == pytest.approx([1.0, 0.1])
    cos, sin = rope.tables(torch.tensor([[0, 3]]), frequencies, torch.float64)
    x = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64).expand(1, 1, 2, 4)
    turned = rope.rotate(x, cos, sin)[0, 0]
    assert turned[0].tolist() == [1, 1, 0, 0]
    expected = [math.cos(3), math.cos(0.3), math.sin(3), math.sin(0.3)]
    assert turned[1].tolist() == pytest.approx(expected)


def test_llama_3_scaling_stretches_long_waves_only():
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain = rope.inverse_frequencies(128, 500000.0, {})
    scaled = rope.inverse_frequencies(128, 500000.0, scaling)
    assert scaled[0] == plain[0]
    assert scaled[-1].item() == pytest.approx(plain[-1].item() / 8)
    ratio = (scaled / plain).tolist()
    assert ratio == sorted(ratio, reverse=True)


def test_linear_scaling_divides_every_frequency():
    plain = rope.inverse_frequencies(8, 10000.0, {})
    scaled = rope.inverse_frequencies(8, 10000.0, {"type": "linear", "factor": 4.0})
    assert torch.allclose(scaled * 4, plain)
