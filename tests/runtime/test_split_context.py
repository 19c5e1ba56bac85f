"""Context parallelism in whole models: the pass, and the numbers of one process."""

import lowering_models as small
import pytest
import torch
from parity import gradient_errors, worst
from parity_cases import TOLERANCE, lowered, own_batches, sgd_truth, start

from costmodels.layout import ContextParallelType, Layout, Recompute, Schedule
from runtime.launch import run_ranks
from runtime.ops.attention import fused_attention
from runtime.ops.gathered_attention import gathered_attention, recomputed_gathered_attention
from runtime.ops.ring_attention import recomputed_ring_attention, ring_attention
from runtime.ops.ulysses_attention import to_heads, to_tokens
from runtime.passes.pipeline import LoweringContext, all_nodes
from runtime.passes.split_context import split_context

RING, ULYSSES, ALL_GATHER = ContextParallelType
SDPA = torch.ops.aten.scaled_dot_product_attention.default


def layout(**changes):
    base = {"layers_per_stage": (8,), "micro_batch_size": 8, "num_micro_batches": 4}
    return Layout(**{**base, "context_parallel": 2, **changes})


# The pass.


def lowered_targets(model="llama", *, flash_attention=True, **changes):
    plan = Layout(layers_per_stage=(small.NUM_LAYERS,), context_parallel=2, **changes)
    job = small.job(flash_attention=flash_attention)
    graph = small.lowered(small.MODELS[model], job, plan)
    return [node.target for node in all_nodes(graph) if node.op == "call_function"]


@pytest.mark.parametrize(
    ("kind", "recompute", "expected"),
    [
        (RING, Recompute.NONE, ring_attention),
        (RING, Recompute.SELECTIVE, recomputed_ring_attention),
        (ALL_GATHER, Recompute.NONE, gathered_attention),
        (ALL_GATHER, Recompute.SELECTIVE, recomputed_gathered_attention),
    ],
)
def test_each_attention_becomes_one_node_of_the_layouts_form(kind, recompute, expected):
    targets = lowered_targets(context_parallel_type=kind, recompute=recompute)
    assert targets.count(expected) == small.NUM_LAYERS
    assert SDPA not in targets


def test_ulysses_exchanges_queries_keys_and_values_before_attention_and_the_output_after():
    targets = lowered_targets(context_parallel_type=ULYSSES)
    assert targets.count(SDPA) == small.NUM_LAYERS
    assert targets.count(to_heads) == 3 * small.NUM_LAYERS
    assert targets.count(to_tokens) == small.NUM_LAYERS


def test_one_context_rank_changes_nothing():
    targets = lowered_targets(context_parallel_type=RING)
    plain = small.lowered(
        small.MODELS["llama"], small.job(), Layout(layers_per_stage=(small.NUM_LAYERS,))
    )
    unchanged = [node.target for node in all_nodes(plain) if node.op == "call_function"]
    assert [SDPA if t is ring_attention else t for t in targets] == unchanged


def attention_graph():
    graph = torch.fx.Graph()
    mesh = graph.placeholder("mesh")
    mesh.meta = {"val": None}
    inputs = [graph.placeholder(name) for name in "qkv"]
    out = graph.call_function(SDPA, (*inputs, None, 0.0, True), {"scale": 0.5, "enable_gqa": True})
    graph.output(out)
    return torch.fx.GraphModule({}, graph)


@pytest.mark.parametrize("kind", ContextParallelType)
def test_split_context_twice_changes_nothing(kind):
    context = LoweringContext(layout=layout(context_parallel_type=kind))
    once = split_context(attention_graph(), context)
    before = [(n.op, n.target, n.args, n.kwargs) for n in once.graph.nodes]
    twice = split_context(once, context)
    assert [(n.op, n.target, n.args, n.kwargs) for n in twice.graph.nodes] == before


def test_the_scale_of_scores_is_kept():
    context = LoweringContext(layout=layout(context_parallel_type=RING))
    graph = split_context(attention_graph(), context)
    (node,) = graph.graph.find_nodes(op="call_function", target=ring_attention)
    assert node.kwargs == {"scale": 0.5}
    assert [source.name for source in node.args] == ["q", "k", "v", "mesh"]


@pytest.mark.parametrize("kind", [RING, ALL_GATHER])
def test_merging_forms_are_refused_without_flash_attention(kind):
    with pytest.raises(ValueError, match="without flash attention it is ulysses"):
        lowered_targets(context_parallel_type=kind, flash_attention=False)


def test_ulysses_attends_by_any_kernel():
    targets = lowered_targets(context_parallel_type=ULYSSES, flash_attention=False)
    assert SDPA not in targets
    assert targets.count(to_heads) == 3 * small.NUM_LAYERS


# Whole models. Each kind meets each degree and partner; ZeRO stages and recomputation go around.

DATA = {"data_parallel": 2, "num_micro_batches": 2}
PARTNERS = {
    "cp2": {},
    "cp2 full": {"recompute": Recompute.FULL, "recompute_layers": 5},
    "cp2 selective": {"recompute": Recompute.SELECTIVE},
    "cp2 zero1": {"zero_stage": 1, "zero_group": 2},
    "cp4": {"context_parallel": 4},
    "cp4 zero3": {"context_parallel": 4, "zero_stage": 3, "zero_group": 4},
    "cp2 tp2": {"tensor_parallel": 2},
    "cp2 tp2 sp": {"tensor_parallel": 2, "sequence_parallel": True},
    "cp2 tp2 sp full": {
        "tensor_parallel": 2,
        "sequence_parallel": True,
        "recompute": Recompute.FULL,
    },
    "cp2 pp2": {
        "pipeline_parallel": 2,
        "layers_per_stage": (3, 5),
        "schedule": Schedule.ONE_F_ONE_B,
    },
    "cp2 pp2 zero3": {
        "pipeline_parallel": 2,
        "layers_per_stage": (4, 4),
        "zero_stage": 3,
        "zero_group": 2,
    },
    "cp2 dp2": DATA,
    "cp2 dp2 zero1": {**DATA, "zero_stage": 1, "zero_group": 4},
    "cp2 dp2 zero2": {**DATA, "zero_stage": 2, "zero_group": 4},
    "cp2 dp2 zero2 hsdp": {**DATA, "zero_stage": 2, "zero_group": 2},
    "cp2 dp2 zero3": {**DATA, "zero_stage": 3, "zero_group": 4},
    "cp2 dp2 zero3 order": {
        **DATA,
        "zero_stage": 3,
        "zero_group": 4,
        "rank_order": ("tp", "dp", "cp", "pp"),
    },
}
MODEL_OF = {RING: "qwen2-untied", ULYSSES: "gpt2-tied", ALL_GATHER: "qwen3-tied"}


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("kind", ContextParallelType)
def test_a_split_context_equals_one_process(kind, num_ranks, equal_one_process):
    plans = [layout(context_parallel_type=kind, **changes) for changes in PARTNERS.values()]
    plans = [plan for plan in plans if plan.num_gpus == num_ranks]
    assert len(plans) >= 4
    equal_one_process(MODEL_OF[kind], num_ranks, plans)


@pytest.mark.parametrize("kind", ContextParallelType)
def test_attention_to_a_ranks_own_tokens_alone_breaks_parity(kind):
    name, plan = "qwen2-untied", layout(context_parallel_type=kind)
    truth = sgd_truth(name)[0]
    graph = lowered(name, plan)

    def work(world):
        mesh, states, executor, program = start(world, graph, plan)

        def error():
            loss = executor.run(own_batches(name, mesh)).item()
            gradient, _ = worst(gradient_errors(states, mesh, truth.gradients))
            states.clear_gradients()
            return max(abs(loss - truth.loss), gradient)

        whole = error()
        found = []
        for unit in program.stages[0].units:
            cut = [n for n in unit.graph.nodes if n.target in (*LOCAL, to_heads, to_tokens)]
            kept = [(node, node.target) for node in cut]
            for node in cut:
                node.target = LOCAL.get(node.target, _stay)
            unit.recompile()
            if cut:
                found.append(error())
            for node, target in kept:
                node.target = target
            unit.recompile()
        return whole, found

    for whole, found in run_ranks(work, 2, timeout=300):
        assert whole < TOLERANCE
        assert len(found) == 8
        assert min(found) > 100 * TOLERANCE, found


def _own_attention(q, k, v, mesh, scale=None):
    return fused_attention(q, k, v, scale)


def _stay(x, mesh):
    return x


LOCAL = {ring_attention: _own_attention, gathered_attention: _own_attention}
