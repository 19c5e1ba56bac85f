"""First values: by seed and name, whatever the layout."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.program import ParameterShard
from runtime.states.initialise import normal_initialiser

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


SHARDS = {
    "whole": {"global_shape": (6, 5)},
    "rows, padded": {"global_shape": (7, 5), "dim": 0, "axis": "tp", "padded_size": 8},
    "columns": {"global_shape": (6, 8), "dim": 1, "axis": "tp", "padded_size": 8},
    "fused": {"global_shape": (12, 5), "dim": 0, "axis": "tp", "num_segments": 3},
    "norm": {"global_shape": (5,)},
    "padded bias": {"global_shape": (7,), "dim": 0, "axis": "tp", "padded_size": 8},
    "experts in": {"global_shape": (4, 12, 5), "dim": 1, "num_segments": 2},
    "experts out": {"global_shape": (4, 5, 6), "dim": 2},
}
EXPERT_AXES = {"axis": "etp", "block_axis": "ep"}


def shards():
    for name, facts in SHARDS.items():
        axes = EXPERT_AXES if name.startswith("experts") else {}
        sizes = {"padded_size": facts["global_shape"][facts["dim"]]} if "dim" in facts else {}
        yield ParameterShard(name=f"{name}.weight", **{**sizes, **axes, **facts})


class Grid:
    """A rank's place on two axes of two ranks each."""

    def __init__(self, inner, outer):
        self.at = {"tp": inner, "etp": inner, "ep": outer}
        self.size = dict.fromkeys(self.at, 2).get

    def coordinate(self, axis):
        return self.at[axis]


@pytest.mark.parametrize("chunk", [1, 16, 2**20])
def test_a_rank_draws_the_piece_that_it_would_cut_from_the_whole(chunk, monkeypatch):
    monkeypatch.setattr("runtime.states.initialise.CHUNK", chunk)
    make = normal_initialiser(3, 2, CPU)
    for shard in shards():
        for inner in range(2):
            for outer in range(2):
                mesh = Grid(inner, outer)
                expected = shard.of_rank(make(shard), mesh)
                assert torch.equal(make.piece(shard, mesh), expected), shard.name


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that was made."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_no_rank_holds_all_experts(monkeypatch):
    monkeypatch.setattr("runtime.states.initialise.CHUNK", 64)
    shape = (4, 12, 16)
    shard = ParameterShard(
        name="experts.gate_up_proj", global_shape=shape, dim=1, num_segments=2, **EXPERT_AXES
    )
    with Largest() as largest:
        piece = normal_initialiser(0, 2, CPU).piece(shard, Grid(1, 1))
    assert piece.shape == (2, 6, 16)
    assert largest.numel == piece.numel()
