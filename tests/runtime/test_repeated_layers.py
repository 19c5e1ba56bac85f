"""A graph with repeated layers is the graph of the whole model, node by node."""

from dataclasses import replace

import lowering_models as small
import parity_cases as parity
import pytest
import torch

from runtime.capture import repeated_layers
from runtime.capture.export import capture
from runtime.capture.repeated_layers import capture_model
from runtime.models import build_model

MIXTRAL, DEEPSEEK = parity.EXPERTS["mixtral"], parity.EXPERTS["deepseek"]
DENSE = {name: replace(spec, num_layers=4) for name, spec in small.MODELS.items()}
EXPERTS = {
    "mixtral": replace(MIXTRAL, num_layers=5),
    "deepseek": replace(DEEPSEEK, num_layers=7, moe=replace(DEEPSEEK.moe, num_dense_layers=3)),
    "one-dense": replace(DEEPSEEK, num_layers=4, moe=replace(DEEPSEEK.moe, num_dense_layers=1)),
}
MODELS = DENSE | EXPERTS


def described(graph):
    """Return all that passes see of a graph; names of nodes are numbers alone."""
    order = {node: place for place, node in enumerate(graph.graph.nodes)}

    def reference(node):
        return ("node", order[node])

    rows = []
    for node in graph.graph.nodes:
        arguments = torch.fx.map_arg((node.args, node.kwargs), reference)
        target = node.name if node.op == "placeholder" else node.target
        shape = getattr(node.meta["val"], "shape", None) if "val" in node.meta else None
        rows.append((node.op, target, str(arguments), node.meta.get("module"), str(shape)))
    return rows


def values(graph):
    held = {**dict(graph.named_parameters()), **dict(graph.named_buffers())}
    return {
        name: (tensor.shape, tensor.dtype, tensor.device, None if tensor.is_meta else tensor.sum())
        for name, tensor in held.items()
    }


@pytest.mark.parametrize("name", MODELS)
def test_repeated_layers_are_those_of_the_whole_model(name, monkeypatch):
    traced = []

    def noted(model, **options):
        traced.append(model)
        return capture(model, **options)

    monkeypatch.setattr(repeated_layers, "capture", noted)
    spec = MODELS[name]
    repeated = capture_model(spec, seq_len=small.SEQ, dtype=torch.bfloat16)
    (short,) = traced
    assert len([m for m in short.modules() if type(m).__name__ in ("Layer", "Block")]) <= 3
    whole = capture(build_model(spec, seq_len=small.SEQ), dtype=torch.bfloat16)
    assert described(repeated) == described(whole)
    assert values(repeated) == values(whole)
