"""Modules that a person's function builds: described, cut, and equal to one process."""

from dataclasses import replace

import lowering_models as small
import plain_modules as plain
import pytest
import torch
from parity import gradient_errors, worst
from test_initialise import Grid

from costmodels.layout import ContextParallelType, Layout, Recompute, Schedule
from costmodels.model import ModelSpec
from costmodels.parameters import num_parameters
from runtime.any_module.described import describe
from runtime.any_module.modules import build_module
from runtime.capture.export import capture
from runtime.context import context_share
from runtime.executor import Executor
from runtime.launch import run_ranks
from runtime.lower import lower_graph, program_of
from runtime.models import build_model
from runtime.program import ParameterShard
from runtime.states.zero import Precisions, ShardedStates
from runtime.training.data import share_of

TOLERANCE = 1e-5
BATCH, SEQ = 8, plain.LENGTH
LAYERS = plain.DEPTH
FREE = {"name", "architecture", "training_seq_len", "norm_epsilon", "activation", "rope_theta"}


@pytest.mark.parametrize("name", small.MODELS)
def test_the_facts_of_a_known_model_are_read_off_its_graph(name):
    spec = small.MODELS[name]
    found = describe(capture(build_model(spec, seq_len=small.SEQ)), name).spec
    assert num_parameters(found) == num_parameters(spec)
    for field in ModelSpec.__slots__:
        if field not in FREE:
            assert getattr(found, field) == getattr(spec, field), field


@pytest.mark.parametrize("name", ["plain_gpt", "plain_mixer"])
def test_a_module_is_described_alike_in_the_dtype_that_a_plan_computes_in(name):
    reference = f"plain_modules:{name}"
    narrow = build_module(reference, dtype=torch.bfloat16)
    assert {p.dtype for p in narrow.graph.parameters()} == {torch.bfloat16}
    assert narrow.describe() == build_module(reference).describe()


def test_what_no_rule_cuts_is_named_with_its_cost():
    description = build_module("plain_modules:plain_mixer").describe()
    (warning,) = description.warnings()
    assert "blend.weight" in warning
    assert f"{LAYERS * plain.WIDTH**2:,} weights" in warning
    assert description.spec.whole_matrices == plain.WIDTH**2
    assert any("cut by columns: (mixer_a to mixer_d).q.weight" in t for t in description.lines())
    assert build_module("plain_modules:plain_gpt").describe().spec.whole_vectors == plain.WIDTH


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("no_such_package:f", "cannot be imported"),
        ("plain_modules:no_such_function", "no function"),
        ("plain_modules:DEPTH", "no function"),
        ("plain_modules:broken", "fails: RuntimeError: out of ideas"),
        ("plain_modules:no_module", "returns a int"),
        ("plain_modules:lone_layer", "takes"),
        ("plain_modules:uneven", "block 3 is"),
        ("plain_modules:keys_are_values", "of which the planner explains"),
        ("plain_modules:by_hand", "scaled_dot_product_attention 0 times"),
        ("two words", "not of the form"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_sentence(reference, words):
    with pytest.raises(ValueError, match=words):
        build_module(reference).describe()


def test_a_table_sliced_to_the_length_rules_the_context_axis_out_in_words():
    (warning,) = build_module("plain_modules:sliced_buffer").describe().warnings()
    assert warning == "waves is sliced to the length: plan with --cp 1"


def whole_shards(built):
    return {
        name: ParameterShard(name=name, global_shape=tuple(parameter.shape))
        for name, parameter in built.graph.named_parameters()
    }


def test_first_values_are_those_that_the_constructor_means():
    built = build_module("plain_modules:plain_gpt", seed=1)
    assert not built.warnings
    shards = whole_shards(built)
    values = {name: built.values(shard) for name, shard in shards.items()}
    assert torch.equal(values["cells.0.gamma"], torch.full((plain.WIDTH,), 0.5))
    assert torch.equal(values["last_norm.weight"], torch.ones(plain.WIDTH))
    weight = values["cells.2.widen.weight"]
    bound = plain.WIDTH**-0.5  # nn.Linear's own
    assert 0.9 * bound < weight.abs().max() <= bound
    assert not torch.equal(weight, values["cells.1.widen.weight"])
    assert torch.equal(
        weight,
        build_module("plain_modules:plain_gpt", seed=1).values(shards["cells.2.widen.weight"]),
    )


def test_copied_blocks_and_scaled_weights_begin_as_their_originals_do():
    built = build_module("plain_modules:stacked")
    values = {name: built.values(shard) for name, shard in whole_shards(built).items()}
    bound = plain.WIDTH**-0.5  # nn.Linear's own
    for cell in range(plain.DEPTH):
        assert torch.equal(values[f"cells.{cell}.gamma"], torch.full((plain.WIDTH,), 0.5))
        assert torch.equal(values[f"cells.{cell}.before_mlp.weight"], torch.ones(plain.WIDTH))
        assert 0.9 * bound < values[f"cells.{cell}.widen.weight"].abs().max() <= bound
    assert values["tokens.weight"].std().item() == pytest.approx(0.1, rel=0.1)


def test_what_of_first_values_no_rank_can_draw_is_named():
    assert [*build_module("plain_modules:stacked").warnings] == [
        "places.weight: cumsum.default of its first values is left out, so it begins as zeros",
        "cells.1.narrow.weight: orthogonal_ of its first values is left out",
        "last_norm.bias: nothing fills it, so it begins as zeros",
    ]


def test_a_rank_draws_the_piece_of_the_constructors_values_that_it_would_cut():
    built = build_module("plain_modules:truncated", seed=2)
    shards = whole_shards(built)
    weight = built.values(shards["cells.1.widen.weight"])
    assert 0.029 < weight.abs().max() <= 0.03
    assert 0.01 < weight.std() < 0.02
    for name in ("cells.1.widen.weight", "cells.0.attention.to_qkv.weight", "tokens.weight"):
        for dim in (0, 1):
            size = shards[name].global_shape[dim]
            shard = replace(shards[name], dim=dim, axis="tp", padded_size=size + size % 2)
            for index in range(2):
                mesh = Grid(index, 0)
                expected = shard.of_rank(built.values(shards[name]), mesh)
                assert torch.equal(built.values.piece(shard, mesh), expected), name


# Parity.

LAYOUTS = [
    {"data_parallel": 4},
    {"data_parallel": 4, "zero_stage": 1, "zero_group": 4},
    {"data_parallel": 4, "zero_stage": 3, "zero_group": 4, "recompute": Recompute.FULL},
    {"pipeline_parallel": 4},
    {
        "pipeline_parallel": 2,
        "stages_per_rank": 2,
        "schedule": Schedule.INTERLEAVED,
        "data_parallel": 2,
        "zero_stage": 1,
        "zero_group": 2,
    },
    {
        "tensor_parallel": 2,
        "data_parallel": 2,
        "zero_stage": 3,
        "zero_group": 2,
        "sequence_parallel": True,
    },
    {"tensor_parallel": 2, "pipeline_parallel": 2},
    {"tensor_parallel": 2, "context_parallel": 2, "sequence_parallel": True},
    {
        "context_parallel": 2,
        "pipeline_parallel": 2,
        "context_parallel_type": ContextParallelType.ULYSSES,
    },
]
EXPERT_LAYOUTS = [
    {"expert_parallel": 2, "data_parallel": 4, "zero_stage": 1, "zero_group": 4},
    {"expert_parallel": 2, "tensor_parallel": 2, "pipeline_parallel": 2, "sequence_parallel": True},
    {"expert_tensor_parallel": 2, "expert_parallel": 2, "data_parallel": 2, "tensor_parallel": 2},
]


def layout_of(facts):
    stages = facts.get("pipeline_parallel", 1) * facts.get("stages_per_rank", 1)
    micro = BATCH // facts.get("data_parallel", 1) // 2
    group = facts.get("data_parallel", 1) * facts.get("context_parallel", 1)
    return Layout(
        **{
            "zero_group": group,
            "micro_batch_size": 2,
            "num_micro_batches": micro,
            "layers_per_stage": (LAYERS // stages,) * stages,
            **facts,
        }
    )


def reference(model, values, data):
    """Return the mean loss of the plain module and its gradients."""
    loss, gradients = small.reference(model, values, data)
    count = int((data["labels"] != -100).sum())
    return loss / count, {name: g / count for name, g in gradients.items()}


def errors_of(world, case):
    graph, layout, values, data, truth = case
    mesh = world.mesh(layout)
    program = program_of(graph, layout, mesh)
    dtypes = Precisions(gradients=torch.float32, master=torch.float32)
    states = ShardedStates(program, mesh, dtypes, initialise=lambda shard: values[shard.name])
    share = share_of(BATCH, layout.data_parallel, mesh.coordinate("dp"))
    batches = [
        context_share({k: v[i : i + 2] for k, v in data.items()}, layout, mesh.coordinate("cp"))
        for i in range(share.start, share.stop, 2)
    ]
    loss = Executor(program, mesh, states).run(batches)
    error, name = worst(gradient_errors(states, mesh, truth[1]))
    return [abs(loss.item() - truth[0].item()) / truth[0].item(), error, name]


def check_parity(make, layouts):
    cases = []
    for facts in layouts:
        model = make()
        values = small.weights(model, scale=0.15)
        data = small.batch(size=BATCH, vocab_size=plain.VOCABULARY)
        truth = reference(model, values, data)
        layout = layout_of(facts)
        cases.append((lower_graph(model, small.job(), layout), layout, values, data, truth))

    def all_errors(world):
        return [errors_of(world, case) for case in cases]

    for rank in run_ranks(all_errors, 4, timeout=240):
        for facts, (loss, gradient, name) in zip(layouts, rank, strict=True):
            assert loss < TOLERANCE, facts
            assert gradient < TOLERANCE, (facts, name)


@pytest.mark.parametrize("make", [plain.plain_gpt, plain.plain_mixer])
def test_a_plain_module_gives_the_gradients_of_one_process(make):
    check_parity(make, LAYOUTS)


def test_keys_that_are_values_give_the_gradients_of_one_process():
    check_parity(
        plain.keys_are_values,
        [
            {"tensor_parallel": 2, "pipeline_parallel": 2},
            {"context_parallel": 4},
            {"data_parallel": 4, "recompute": Recompute.SELECTIVE},
        ],
    )


def test_unmodified_mixtral_gives_the_gradients_of_one_process_with_experts_spread():
    pytest.importorskip("transformers")
    from test_transformers_models import make  # noqa: PLC0415  (needs transformers)

    check_parity(lambda: make("mixtral"), EXPERT_LAYOUTS)


def test_a_table_sliced_to_the_length_is_refused_where_sequences_are_split():
    layout = layout_of({"context_parallel": 2, "data_parallel": 2})
    with pytest.raises(ValueError, match=r"places is sliced .* --cp 1"):
        lower_graph(plain.sliced_positions(), small.job(), layout)
