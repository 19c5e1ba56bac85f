"""Roles are read off the graph: names play no part."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from costmodels.layout import Layout
from runtime.capture.export import capture
from runtime.passes import PIPELINE
from runtime.passes.canonicalise import canonicalise
from runtime.passes.pipeline import LoweringContext, run_passes
from runtime.passes.placements import Replicated
from runtime.passes.roles import Part, Role, infer_roles


class Odd(nn.Module):
    """A one-layer model whose names say nothing; `block` is its body."""

    def __init__(self, block):
        super().__init__()
        self.alpha = nn.Embedding(12, 8)
        self.parts = nn.ModuleList([block])
        self.omega = nn.Linear(8, 12)

    def forward(self, input_ids, position_ids):
        x = self.alpha(input_ids)
        x = x + self.parts[0](functional.layer_norm(x, (8,)))
        return self.omega(x) + 0 * position_ids[..., None]


def roles_of(block):
    context = LoweringContext(layout=Layout(layers_per_stage=(1,)))
    return infer_roles(canonicalise(capture(Odd(block)), context))


COLUMN, ROW = Role(part=Part.COLUMN), Role(part=Part.ROW)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(8, 16, bias=False)
        self.c = nn.Linear(16, 8)

    def forward(self, x):
        return self.c(torch.relu(self.a(x)) * self.b(x))


def test_layers_between_which_features_stay_apart_are_columns_and_a_row():
    roles = roles_of(Gated())
    vocabulary = Role(part=Part.VOCABULARY)
    assert roles == {
        "alpha.weight": vocabulary,
        "omega.weight": vocabulary,
        "omega.bias": vocabulary,
        "parts.0.a.weight": COLUMN,
        "parts.0.a.bias": COLUMN,
        "parts.0.b.weight": COLUMN,
        "parts.0.c.weight": ROW,
    }


class Normed(Gated):
    def forward(self, x):
        return self.c(functional.layer_norm(torch.relu(self.a(x)) * self.b(x), (16,)))


def test_a_norm_over_all_features_keeps_its_layers_whole():
    assert not [name for name in roles_of(Normed()) if name.startswith("parts")]


class Fused(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.sizes = sizes
        self.a, self.c = nn.Linear(8, sum(sizes)), nn.Linear(8, 8)

    def forward(self, x):
        first, second = self.a(x).split(self.sizes, -1)
        return self.c(first * second[..., :8])


@pytest.mark.parametrize(("sizes", "segments"), [([8, 8], 2), ([8, 16], 0)])
def test_a_fused_layer_is_cut_in_equal_segments_or_not_at_all(sizes, segments):
    roles = roles_of(Fused(sizes))
    if segments:
        assert roles["parts.0.a.weight"] == Role(part=Part.COLUMN, num_segments=segments)
        assert roles["parts.0.c.weight"] == ROW
    else:
        assert not [name for name in roles if name.startswith("parts")]


class Sorted(Gated):
    def forward(self, x):
        return self.c(torch.sort(torch.relu(self.a(x)) * self.b(x), dim=-1)[0])


def test_an_operation_without_a_rule_is_done_whole_with_a_warning():
    layout = Layout(tensor_parallel=2, layers_per_stage=(1,))
    passes = PIPELINE[:-2]  # before the split into units
    graph = run_passes(capture(Odd(Sorted())), LoweringContext(layout=layout), passes)
    (warning,) = graph.meta["warnings"]
    assert "no rule cuts aten.sort" in warning
    assert warning.startswith("parts.0")
    (call,) = [n for n in graph.graph.nodes if n.target is torch.ops.aten.sort.default]
    assert call.meta["placement"] == Replicated()
