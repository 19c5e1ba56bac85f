"""Each pass, before and after: what it writes, that twice is once, what it refuses."""

import copy

import lowering_models as small
import pytest
import torch
from torch import nn
from torch.nn import functional

from costmodels.layout import Layout, Recompute
from runtime.capture.export import capture
from runtime.communication import collectives
from runtime.ops import attention, norm
from runtime.passes import PIPELINE, LoweringContext, Pass, run_passes
from runtime.passes.canonicalise import canonicalise, only_canonical_operations
from runtime.passes.pipeline import format_difference, op_counts
from runtime.passes.placements import Replicated, Sharded
from runtime.passes.split_layers import split_layers

aten = torch.ops.aten
SPLIT = len(PIPELINE) - 2  # passes before the graph is split


def context(**changes):
    flash = changes.pop("flash_attention", True)
    layout = Layout(**{"layers_per_stage": (small.NUM_LAYERS,), **changes})
    return LoweringContext(layout=layout, flash_attention=flash)


@pytest.fixture(scope="module")
def captured():
    graphs = {}

    def get(name):
        if name not in graphs:
            graphs[name] = capture(small.plain_model(small.MODELS[name]))
        return copy.deepcopy(graphs[name])

    return get


def lowered(captured, name, number_of_passes=None, **changes):
    return run_passes(captured(name), context(**changes), PIPELINE[:number_of_passes])


def targets(graph):
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def shards(graph):
    nodes = [n for n in graph.graph.nodes if "shard" in n.meta]
    return {node.meta["shard"].name: node.meta["shard"] for node in nodes}


# The runner.


def test_every_invariant_so_far_is_checked_after_each_pass():
    checks = []

    def first(graph, _):
        return graph

    def second(graph, _):
        return graph

    passes = (
        Pass(first, lambda *_: checks.append("first")),
        Pass(second, lambda *_: checks.append("second")),
    )
    graph = torch.fx.symbolic_trace(nn.Identity())
    run_passes(graph, context(), passes)
    assert checks == ["first", "first", "second"]


def test_the_difference_of_operations_is_told_in_words(captured):
    before = op_counts(captured("llama"))
    after = op_counts(lowered(captured, "llama", SPLIT, tensor_parallel=2))
    words = format_difference(before, after)
    assert "+9 reduce_from" in words
    assert "-1 embedding" in words
    assert format_difference(before, before) == "no change"


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
@pytest.mark.parametrize("count", range(1, len(PIPELINE) + 1))
def test_a_pass_twice_is_a_pass_once(captured, name, count):
    changes = {"tensor_parallel": 2, "sequence_parallel": True, "recompute": Recompute.SELECTIVE}
    once = lowered(captured, name, count, **changes)
    before = once.code
    again = PIPELINE[count - 1].rewrite(once, context(**changes))
    again.recompile()
    assert again.code == before


# canonicalise


class Masked(nn.Module):
    """One attention layer with an explicit mask, dropout, no-ops and a device of its own."""

    def __init__(self, visible, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.visible = visible
        self.dropout = nn.Dropout(dropout)

    def forward(self, input_ids, position_ids):
        heads = self.dropout(self.embed(input_ids))[:, None].to(torch.float32)
        length = torch.arange(input_ids.shape[1], device=input_ids.device)
        mask = self.visible(length[:, None], length[None, :])
        out = functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
        return self.head(out[:, 0] + 0 * position_ids[..., None])


def test_a_computed_causal_mask_becomes_a_flag():
    graph = canonicalise(capture(Masked(lambda q, k: q >= k)), context())
    only_canonical_operations(graph, context())
    (call,) = [
        n for n in graph.graph.nodes if n.target is aten.scaled_dot_product_attention.default
    ]
    assert call.args[3:] == (None, 0.0, True)
    assert aten.arange.default not in targets(graph)
    assert aten.dropout.default not in targets(graph)


@pytest.mark.parametrize("visible", [lambda q, k: q > k - 2, lambda q, k: (q - k).abs() < 3])
def test_a_mask_that_is_not_causal_is_refused(visible):
    with pytest.raises(ValueError, match="mask that is not causal"):
        canonicalise(capture(Masked(visible)), context())


def test_dropout_is_refused_with_its_probability():
    with pytest.raises(ValueError, match=r"drops out with probability 0\.25"):
        canonicalise(capture(Masked(lambda q, k: q >= k, dropout=0.25)), context())


def test_norms_become_the_operation_that_keeps_less(captured):
    graph = lowered(captured, "llama", 1)
    assert aten.rms_norm.default not in targets(graph)
    assert targets(graph).count(norm.rms_norm) == 2 * small.NUM_LAYERS + 1


# shard_tensors


def test_one_process_needs_no_collective(captured):
    graph = lowered(captured, "llama", SPLIT)
    assert not [t for t in targets(graph) if getattr(t, "__module__", "") == collectives.__name__]
    assert {shard.axis for shard in shards(graph).values()} == {None}


@pytest.mark.parametrize("name", small.MODELS)
def test_sequence_parallel_gathers_and_scatters_twice_a_layer(captured, name):
    graph = lowered(captured, name, SPLIT, tensor_parallel=2, sequence_parallel=True)
    counts = op_counts(graph)
    blocks = 2 * small.NUM_LAYERS
    assert counts["all_gather"] == blocks + 1  # the head reads the whole sequence
    assert counts["reduce_scatter"] == blocks + 1  # the embedding sums over the vocabulary
    assert counts["vocab_parallel_cross_entropy"] == 1
    assert graph.meta["warnings"] == ()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_16_bit_graphs_gather_nothing_more(name):
    """The logits' cast to fp32 must not gather what it casts."""
    model = small.plain_model(small.MODELS[name])
    graph = capture(model, dtype=torch.bfloat16)
    both = {"tensor_parallel": 2, "sequence_parallel": True}
    graph = run_passes(graph, context(**both), PIPELINE)
    assert op_counts(graph)["gather_replicated"] == 0
    assert graph.meta["warnings"] == ()


def test_projections_are_columns_and_rows_and_the_vocabulary_is_padded(captured):
    graph = lowered(captured, "llama", SPLIT, tensor_parallel=2)
    found = shards(graph)
    layer = "model.layers.0."
    dims = {
        name.removeprefix(layer): shard.dim
        for name, shard in found.items()
        if name.startswith(layer)
    }
    assert dims == {
        "input_layernorm.weight": None,
        "self_attn.q_proj.weight": 0,
        "self_attn.k_proj.weight": 0,
        "self_attn.v_proj.weight": 0,
        "self_attn.o_proj.weight": 1,
        "post_attention_layernorm.weight": None,
        "mlp.gate_proj.weight": 0,
        "mlp.up_proj.weight": 0,
        "mlp.down_proj.weight": 1,
    }
    assert found["lm_head.weight"].padded_size == 102
    assert found["lm_head.weight"].local_shape(2) == (51, 32)


def test_weights_stored_the_other_way_are_cut_the_other_way(captured):
    found = shards(lowered(captured, "gpt2", SPLIT, tensor_parallel=2))
    attention_in = found["transformer.h.0.attn.c_attn.weight"]
    assert (attention_in.dim, attention_in.num_segments) == (1, 3)
    assert found["transformer.h.0.attn.c_attn.bias"].num_segments == 3
    assert found["transformer.h.0.attn.c_proj.weight"].dim == 0
    assert found["transformer.h.0.attn.c_proj.bias"].dim is None


@pytest.mark.parametrize(
    ("name", "sequence_parallel", "summed"),
    [
        ("llama", False, set()),
        ("llama", True, {"input_layernorm", "post_attention_layernorm", "norm"}),
        ("qwen3", False, {"q_norm", "k_norm"}),
        ("gpt2", False, set()),
        ("gpt2", True, {"ln_1", "ln_2", "ln_f", "c_proj", "wpe"}),
    ],
)
def test_copies_that_see_a_part_sum_their_gradients(captured, name, sequence_parallel, summed):
    graph = lowered(captured, name, SPLIT, tensor_parallel=2, sequence_parallel=sequence_parallel)
    found = {s.name.split(".")[-2] for s in shards(graph).values() if s.gradient_sum_axes}
    assert found == summed


def test_heads_that_do_not_divide_are_refused_with_both_numbers(captured):
    with pytest.raises(ValueError, match=r"of 4 does not divide over tensor_parallel 8"):
        lowered(captured, "llama", SPLIT, tensor_parallel=8)


def test_placements_stand_on_every_value(captured):
    graph = lowered(captured, "llama", SPLIT, tensor_parallel=2, sequence_parallel=True)
    places = {node.name: node.meta["placement"] for node in graph.graph.nodes}
    assert places["scaled_dot_product_attention"] == Sharded(1)
    assert places["labels"] == Replicated()


# split_layers


def test_only_the_hidden_state_crosses_between_layers(captured):
    graph = lowered(captured, "llama")
    calls = [n for n in graph.graph.nodes if n.op == "call_module"]
    assert [str(n.target) for n in calls] == [
        "shared",
        *(f"units.{i}" for i in range(small.NUM_LAYERS + 2)),
    ]
    assert all("hidden" in call.meta["inputs"] for call in calls[2:])
    names = {name for unit in graph.units.children() for name, _ in unit.named_parameters()}
    assert names == set(dict(small.plain_model(small.MODELS["llama"]).named_parameters()))


def test_a_plan_for_another_number_of_layers_is_refused(captured):
    with pytest.raises(ValueError, match=r"has 4 layers in 'model.layers', the plan 5"):
        lowered(captured, "llama", layers_per_stage=(2, 3), pipeline_parallel=2)


class Skipping(nn.Module):
    """A model whose first layer is read again after the second."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 11)

    def forward(self, input_ids, position_ids):
        first = self.layers[0](self.embed(input_ids))
        last = self.layers[2](self.layers[1](first)) + first
        return self.head(last + 0 * position_ids[..., None])


def test_a_model_that_skips_layers_cannot_be_split():
    graph = canonicalise(capture(Skipping()), context())
    for node in graph.graph.nodes:
        node.meta["placement"] = Replicated()
    with pytest.raises(ValueError, match="would have to skip a layer to reach"):
        split_layers(graph, context(layers_per_stage=(3,)))


# apply_recompute


@pytest.mark.parametrize(
    ("layers", "chosen"), [(0, {1, 2, 3, 4}), (1, {1, 4}), (2, {1, 2, 4}), (3, {1, 2, 3, 4})]
)
def test_the_first_layers_of_each_stage_are_recomputed(captured, layers, chosen):
    graph = lowered(
        captured,
        "llama",
        recompute=Recompute.FULL,
        recompute_layers=layers,
        pipeline_parallel=2,
        layers_per_stage=(3, 1),
    )
    calls = [n for n in graph.graph.nodes if n.op == "call_module" and n.target != "shared"]
    marked = {i for i, call in enumerate(calls) if call.meta["recompute"]}
    assert marked == chosen


@pytest.mark.parametrize(
    ("recompute", "flash", "expected"),
    [
        (Recompute.NONE, True, aten.scaled_dot_product_attention.default),
        (Recompute.SELECTIVE, True, attention.recomputed_attention),
        (Recompute.NONE, False, attention.unfused_attention),
        (Recompute.SELECTIVE, False, attention.recomputed_unfused_attention),
    ],
)
def test_attention_takes_the_form_of_the_plan(captured, recompute, flash, expected):
    graph = lowered(captured, "llama", recompute=recompute, flash_attention=flash)
    kinds = {aten.scaled_dot_product_attention.default, *attention.FORMS}
    found = [t for unit in graph.units.children() for t in targets(unit) if t in kinds]
    assert found == [expected] * small.NUM_LAYERS
