"""First values: by seed and name, whatever the layout."""

import math

import pytest
import torch

from runtime.initialise import normal_initialiser
from runtime.program import ParameterShard

CPU = torch.device("cpu")


def value(name, shape, seed=0, num_layers=8):
    shard = ParameterShard(name=name, global_shape=shape)
    return normal_initialiser(seed, num_layers, CPU)(shard)


def test_norms_begin_at_one_and_biases_at_zero():
    assert torch.equal(value("model.norm.weight", (7,)), torch.ones(7))
    assert torch.equal(value("model.layers.0.self_attn.q_proj.bias", (7,)), torch.zeros(7))


@pytest.mark.parametrize(
    ("name", "deviation"),
    [
        ("model.embed_tokens.weight", 0.02),
        ("model.layers.3.self_attn.q_proj.weight", 0.02),
        ("model.layers.3.self_attn.o_proj.weight", 0.02 / 4),
        ("model.layers.3.mlp.down_proj.weight", 0.02 / 4),
        ("transformer.h.3.mlp.c_proj.weight", 0.02 / 4),
    ],
)
def test_ends_of_residual_branches_are_smaller_by_the_root_of_twice_the_layers(name, deviation):
    weights = value(name, (400, 100))
    assert weights.std().item() == pytest.approx(deviation, rel=0.02)
    assert abs(weights.mean().item()) < 4 * deviation / math.sqrt(weights.numel())


def test_values_depend_on_name_and_seed_alone():
    shape = (5, 6)
    assert torch.equal(value("a.weight", shape), value("a.weight", shape))
    assert not torch.equal(value("a.weight", shape), value("b.weight", shape))
    assert not torch.equal(value("a.weight", shape), value("a.weight", shape, seed=1))
