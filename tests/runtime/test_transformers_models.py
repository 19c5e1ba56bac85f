"""Unmodified models of `transformers` lower like our own, and ours compute what theirs do."""

import warnings

import lowering_models as small
import pytest
import torch

from costmodels.layout import Layout
from runtime.capture.export import weights_on_meta
from runtime.launch import run_ranks
from runtime.lower import lower, lower_graph, program_of
from runtime.passes.pipeline import op_counts
from runtime.states.first_values import materialise

transformers = pytest.importorskip("transformers")
from test_lowering_parity import TOLERANCE, run_chain, worst_error  # noqa: E402

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 101,
    "num_hidden_layers": small.NUM_LAYERS,
    "use_cache": False,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
QWEN3_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "head_dim": 4,
    "norm_topk_prob": False,
}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
GPT2_SIZES = {
    "n_embd": 32,
    "n_head": 8,
    "n_layer": small.NUM_LAYERS,
    "n_positions": 64,
    "vocab_size": 101,
    "use_cache": False,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


def make(name):
    torch.manual_seed(0)
    t = transformers
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name == "gpt2":
            return t.GPT2LMHeadModel(t.GPT2Config(**GPT2_SIZES, **NO_TOKENS))
        config, model, extra = {
            "llama": (t.LlamaConfig, t.LlamaForCausalLM, {"rms_norm_eps": 1e-5}),
            "qwen2": (t.Qwen2Config, t.Qwen2ForCausalLM, {"tie_word_embeddings": True}),
            "qwen3": (t.Qwen3Config, t.Qwen3ForCausalLM, {"head_dim": 4}),
            "mistral": (t.MistralConfig, t.MistralForCausalLM, {"sliding_window": None}),
            "mixtral": (t.MixtralConfig, t.MixtralForCausalLM, EXPERTS),
            "qwen3-moe": (t.Qwen3MoeConfig, t.Qwen3MoeForCausalLM, QWEN3_EXPERTS),
        }[name]
        return model(config(**SIZES, **NO_TOKENS, **extra))


NAMES = ["llama", "qwen2", "qwen3", "mistral", "gpt2"]
MOE_NAMES = ["mixtral", "qwen3-moe"]


@pytest.mark.parametrize("name", [*NAMES, *MOE_NAMES])
def test_one_process_equals_the_unmodified_model(name):
    model = make(name)
    values, data = small.weights(model, scale=0.1), small.batch()
    loss, gradients = small.reference(model, values, data)
    layout = Layout(layers_per_stage=(small.NUM_LAYERS,))
    program = lower(model, small.job(), layout, small.lone_mesh(layout))
    assert program.warnings == ()
    materialise(program, lambda shard: values[shard.name])
    got = run_chain(program.stages, data)
    assert got.item() == pytest.approx(loss.item(), rel=TOLERANCE)
    assert worst_error(program.stages, gradients, None, (0, 1)) < TOLERANCE


def test_tensor_parallel_gives_the_gradients_of_the_unmodified_model():
    layout = Layout(tensor_parallel=2, sequence_parallel=True, layers_per_stage=(small.NUM_LAYERS,))
    cases = []
    for name in NAMES:
        model = make(name)
        values, data = small.weights(model, scale=0.1), small.batch()
        loss, gradients = small.reference(model, values, data)
        lowered = lower_graph(model, small.job(), layout)
        assert op_counts(lowered)["all_gather"] == 2 * small.NUM_LAYERS + 1
        cases.append((lowered, values, data, loss, gradients))

    def errors(world):
        found = []
        for lowered, values, data, loss, gradients in cases:
            program = program_of(lowered, layout, world.mesh(layout))
            materialise(program, lambda shard, values=values: values[shard.name])
            got = run_chain(program.stages, data)
            error = worst_error(program.stages, gradients, world, (world.rank, 2))
            found.append([abs(got - loss).item() / loss.item(), error])
        return found

    for rank in run_ranks(errors, 2, timeout=120):
        for name, (loss, gradient) in zip(NAMES, rank, strict=True):
            assert loss < TOLERANCE, name
            assert gradient < TOLERANCE, name


@pytest.mark.parametrize(
    ("name", "spec"), [("llama", small.MODELS["llama"]), ("gpt2", small.MODELS["gpt2"])]
)
def test_our_decoder_has_the_names_and_numbers_of_theirs(name, spec):
    theirs, ours = make(name), small.plain_model(spec)
    shapes = {key: p.shape for key, p in theirs.named_parameters()}
    assert shapes == {key: p.shape for key, p in ours.named_parameters()}
    values, data = small.weights(ours), small.batch()
    expected, their_gradients = small.reference(theirs, values, data)
    loss, our_gradients = small.reference(ours, values, data)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for key, gradient in our_gradients.items():
        scale = their_gradients[key].abs().max()
        assert (gradient - their_gradients[key]).abs().max() < 1e-4 * scale, key


def test_a_model_without_memory_keeps_its_rotary_frequencies():
    with weights_on_meta():
        model = make("llama")
    assert model.model.layers[0].mlp.up_proj.weight.is_meta
    layout = Layout(layers_per_stage=(small.NUM_LAYERS,))
    program = lower(model, small.job(), layout, small.lone_mesh(layout))
    values = small.weights(make("llama"))
    materialise(program, lambda shard: values[shard.name])
    real = make("llama")
    loss, _ = small.reference(real, values, small.batch())
    got = program.stages[0](None, small.batch())
    assert got.item() == pytest.approx(loss.item(), rel=TOLERANCE)
