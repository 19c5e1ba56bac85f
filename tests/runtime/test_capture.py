"""Capture: one graph under the model's names, the same numbers, no memory."""

import lowering_models as small
import pytest
import torch
from torch import nn

from costmodels.model import ModelSpec
from planner.presets import read_model
from runtime.capture.export import capture, weights_on_meta
from runtime.models import build_model


def names(graph):
    return {name for name, _ in graph.named_parameters()}


@pytest.mark.parametrize("name", small.MODELS)
def test_the_graph_computes_what_the_module_computes(name):
    spec = small.MODELS[name]
    model = small.plain_model(spec)
    values, data = small.weights(model), small.batch()
    loss, _ = small.reference(model, values, data)
    graph = capture(model)
    assert names(graph) == set(values)
    for path, value in values.items():
        owner, _, leaf = path.rpartition(".")
        setattr(graph.get_submodule(owner), leaf, nn.Parameter(value))
    for node in graph.graph.nodes:  # what canonicalise does; capture keeps the tracing device
        if isinstance(node.kwargs.get("device"), torch.device):
            node.kwargs = {**node.kwargs, "device": torch.device("cpu")}
    graph.recompile()
    positions = torch.arange(small.SEQ).expand(2, -1)
    got = graph(data["input_ids"], positions, data["labels"])
    assert got.item() == pytest.approx(loss.item(), rel=1e-6)


def test_parameters_take_the_dtype_and_constants_keep_theirs():
    graph = capture(build_model(small.MODELS["llama"], seq_len=small.SEQ), dtype=torch.bfloat16)
    assert {p.dtype for p in graph.parameters()} == {torch.bfloat16}
    assert all(p.is_meta for p in graph.parameters())
    (frequencies,) = graph.buffers()
    assert frequencies.dtype == torch.float32
    assert not frequencies.is_meta


def test_operations_stay_whole_and_know_their_layer():
    graph = capture(build_model(small.MODELS["llama"], seq_len=small.SEQ))
    attention = torch.ops.aten.scaled_dot_product_attention.default
    found = [node for node in graph.graph.nodes if node.target is attention]
    assert [node.meta["module"] for node in found] == [
        f"model.layers.{layer}.self_attn" for layer in range(small.NUM_LAYERS)
    ]


def test_the_largest_preset_costs_no_memory():
    spec = read_model("70b")
    two_layers = ModelSpec(**{f: getattr(spec, f) for f in spec.__slots__} | {"num_layers": 2})
    graph = capture(build_model(two_layers, seq_len=8192), dtype=torch.bfloat16)
    weights = sum(p.numel() for p in graph.parameters())
    assert weights == 2 * 128256 * 8192 + 2 * 855_654_400 + 8192


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 3)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, input_ids, position_ids):
        return self.head(torch.stack((input_ids, position_ids), -1) * self.scale)


def test_a_buffer_without_values_is_refused_by_name():
    with torch.device("meta"):
        model = Buffered()
    with pytest.raises(ValueError, match="buffer scale lies on the meta device"):
        capture(model)


def test_weights_on_meta_leaves_buffers_real():
    with weights_on_meta():
        model = Buffered()
    assert model.head.weight.is_meta
    assert model.scale.tolist() == [1.0, 1.0]
    assert capture(model).scale.tolist() == [1.0, 1.0]


class Untraceable(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(1, 3)

    def forward(self, input_ids, position_ids):
        if input_ids.sum() > position_ids.sum():
            return self.head(input_ids[..., None].float())
        return self.head(position_ids[..., None].float())


def test_a_model_that_cannot_be_traced_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="Untraceable cannot be traced: "):
        capture(Untraceable())
