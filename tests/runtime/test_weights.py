"""Hugging Face folders into shards and back: names, slices, refusals; against transformers."""

import json
from dataclasses import replace
from functools import cache

import lowering_models as small
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.nn import functional

from costmodels.hf_config import spec_from_hf_config
from costmodels.job import Optimizer, Precision, TrainingJob
from costmodels.layout import Layout, split_layers
from runtime.checkpoints.folders import step_name
from runtime.checkpoints.saving import Checkpoints, RunRecord, Samples
from runtime.checkpoints.sharded_state import buffers_of
from runtime.executor import Executor
from runtime.launch import run_ranks
from runtime.lower import program_of
from runtime.models.same import differences
from runtime.states.optimizer import OptimizerSettings, ShardedOptimizer
from runtime.states.zero import Precisions, ShardedStates
from runtime.weights.config import hf_config
from runtime.weights.export import export, main
from runtime.weights.files import INDEX, TensorEntry, open_tensors, write_tensors
from runtime.weights.names import may_be_left, tiles
from runtime.weights.pretrained import (
    check_config,
    check_tensors,
    load_pretrained,
    parameter_shapes,
    read_block,
    spelled,
)

transformers = pytest.importorskip("transformers", reason="the oracle is Hugging Face's own code")

SEQ_LEN = 8
JOB = TrainingJob(seq_len=SEQ_LEN, global_batch_size=4, precision=Precision.FP32)
SGD = OptimizerSettings(kind=Optimizer.SGD)
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 37,  # a prime: no tensor-parallel degree divides it
    "max_position_embeddings": 32,
    "intermediate_size": 24,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
CONFIGS = {
    "llama": SMALL,
    "qwen2": {**SMALL, "tie_word_embeddings": True},
    "qwen3": {**SMALL, "head_dim": 4},
    "mistral": {**SMALL, "sliding_window": None},
    "mixtral": {**SMALL, "num_local_experts": 4, "sliding_window": None},
    "qwen2_moe": {
        **SMALL,
        **ROUTED,
        "num_experts": 4,
        "shared_expert_intermediate_size": 12,
    },
    "qwen3_moe": {**SMALL, **ROUTED, "num_experts": 4, "head_dim": 4},
    "deepseek_v2": {**SMALL, **ROUTED, **LATENT, "q_lora_rank": None},
    "deepseek_v3": {
        **SMALL,
        **ROUTED,
        **LATENT,
        "q_lora_rank": 8,
        "n_group": 2,
        "topk_group": 1,
    },
    "gpt2": {
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 37,
        "n_positions": 32,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
FAMILIES = tuple(CONFIGS)


def layout(**fields):
    data = fields.get("data_parallel", 1)
    return Layout(
        num_micro_batches=4 // data,
        layers_per_stage=split_layers(2, fields.get("pipeline_parallel", 1)),
        **{"zero_group": data, **fields},
    )


# One plan for each family, so that each way to cut meets some weights of each kind.
PLANS = {
    "llama": layout(tensor_parallel=2, sequence_parallel=True),
    "qwen2": layout(pipeline_parallel=2),
    "qwen3": layout(data_parallel=2, zero_stage=3),
    "mistral": layout(data_parallel=2, zero_stage=1),
    "gpt2": layout(tensor_parallel=2),
    "mixtral": layout(data_parallel=2, expert_parallel=2, zero_stage=1),
    "qwen3_moe": layout(data_parallel=2, expert_parallel=2),
    "deepseek_v3": layout(),
    "deepseek_v2": layout(),
    "qwen2_moe": layout(),
}


def random_model(family):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **CONFIGS[family])
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, values in [*model.named_parameters(), *model.named_buffers()]:
            is_constant = "inv_freq" in name
            if not is_constant:  # nothing stays 0 or 1
                values.copy_(values + torch.randn_like(values) / 10)
    return model


@cache
def values_of(family):
    """Return a model's weights under transformers' own names, which are ours."""
    return {name: value.clone() for name, value in random_model(family).state_dict().items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        random_model(family).save_pretrained(root / family, max_shard_size="6KB")
    return root


def spec_of(folder):
    config = json.loads((folder / "config.json").read_text())
    return spec_from_hf_config(config, name=folder.name, source="test")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_read_whole_and_nothing_is_left_over(folders, family):
    spec = spec_of(folders / family)
    shapes = parameter_shapes(spec)
    assert (folders / family / INDEX).exists()  # several files
    with open_tensors(folders / family) as tensors:
        check_tensors(tensors, spec, shapes)
        for name, shape in shapes.items():
            whole = torch.full(shape, torch.nan)
            read_block(
                tensors, spelled(tensors, tiles(family, name, shape)), [0] * len(shape), whole
            )
            assert torch.equal(whole, values_of(family)[name]), name


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_block_of_fused_experts_is_read_from_its_own_files(folders, data):
    name, family = "model.layers.1.mlp.experts.gate_up_proj", "mixtral"
    whole = values_of(family)[name]
    begins = [data.draw(st.integers(0, size - 1)) for size in whole.shape]
    sizes = [data.draw(st.integers(1, n - b)) for n, b in zip(whole.shape, begins, strict=True)]
    block = torch.full(sizes, torch.nan)
    with open_tensors(folders / family) as tensors:
        read_block(tensors, tiles(family, name, tuple(whole.shape)), begins, block)
    place = tuple(slice(b, b + n) for b, n in zip(begins, sizes, strict=True))
    assert torch.equal(block, whole[place])


class Holder:
    """A rank that holds a model's weights under a plan, with all that a checkpoint needs."""

    def __init__(self, world, spec, graph, plan, folder):
        self.mesh = world.mesh(plan)
        program = program_of(graph, plan, self.mesh)
        formats = Precisions(gradients=torch.float32, master=torch.float32)
        self.states = ShardedStates(
            program, self.mesh, formats, initialise=lambda s: torch.zeros(s.global_shape)
        )
        self.executor = Executor(program, self.mesh, self.states)
        self.optimizer = ShardedOptimizer(self.states, SGD)
        self.buffers = buffers_of(program)
        samples = Samples(source="suite", seed=0, seq_len=SEQ_LEN, global_batch_size=4)
        record = RunRecord(num_steps=0, model=spec, optimizer=SGD, samples=samples)
        self.checkpoints = Checkpoints(folder, self.mesh, world.host_group(), record)


def tokens():
    return torch.randint(0, 37, (4, SEQ_LEN + 1), generator=torch.Generator().manual_seed(3))


def batches(plan, mesh):
    rows = tokens().chunk(plan.data_parallel)[mesh.coordinate("dp")]
    return [
        {"input_ids": r[None, :-1].contiguous(), "labels": r[None, 1:].contiguous()} for r in rows
    ]


def load_and_save(folder, plan, output, spec=None):
    """Load a folder under a plan, run a step without training, save; return the loss."""
    spec = spec or spec_of(folder)
    graph = small.lowered(spec, JOB, plan)

    def work(world):
        held = Holder(world, spec, graph, plan, output)
        load_pretrained(folder, spec, held.mesh, held.states, held.buffers)
        loss = held.executor.run(batches(plan, held.mesh)).item()
        held.states.clear_gradients()
        held.checkpoints.save(held.states, held.optimizer, held.buffers, 0)
        return loss

    return run_ranks(work, plan.num_gpus, timeout=200)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_through_shards_and_a_checkpoint_comes_back_bit_by_bit(folders, family, tmp_path):
    loss = load_and_save(folders / family, PLANS[family], tmp_path)
    logits = random_model(family).eval()(input_ids=tokens()[:, :-1]).logits
    expected = functional.cross_entropy(logits.flatten(0, 1), tokens()[:, 1:].flatten())
    assert loss == pytest.approx(expected.item(), abs=1e-5)

    export(tmp_path / step_name(0), tmp_path / "out", dtype=torch.float32, file_bytes=10_000)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert type(back) is type(random_model(family))
    found = back.state_dict()
    assert found.keys() == values_of(family).keys()
    for name, values in values_of(family).items():
        assert torch.equal(found[name], values), name
    there = {path.name for path in (folders / family).iterdir()}
    with open_tensors(folders / family) as old, open_tensors(tmp_path / "out") as new:
        assert old.names == new.names
    assert INDEX in there


def test_published_gpt2_files_lack_the_first_part_of_names_and_carry_masks(folders, tmp_path):
    spec = spec_of(folders / "gpt2")
    plain = {n.removeprefix("transformer."): v for n, v in values_of("gpt2").items()}
    plain.pop("lm_head.weight")  # tied
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 32, 32) for layer in range(2)}
    save_file({**plain, **masks}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folders / "gpt2" / "config.json").read_text())
    shapes = parameter_shapes(spec)
    with open_tensors(tmp_path) as tensors:
        check_tensors(tensors, spec, shapes)
        (tile,) = spelled(tensors, tiles("gpt2", "transformer.wte.weight", (37, 16)))
        assert tile.name == "wte.weight"


def test_what_may_be_left_in_a_file():
    facts = {"num_layers": 2, "is_tied": False}
    assert may_be_left("model.layers.1.self_attn.rotary_emb.inv_freq", **facts)
    assert may_be_left("model.layers.2.embed_tokens.weight", **facts)  # predicts a further token
    assert may_be_left("h.0.attn.masked_bias", **facts)
    assert not may_be_left("model.layers.1.mlp.up_proj.weight", **facts)
    assert not may_be_left("transformer.h.0.attn.c_attn.bias", **facts)
    assert not may_be_left("lm_head.weight", **facts)
    assert may_be_left("lm_head.weight", num_layers=2, is_tied=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_that_is_written_reads_back_as_the_same_model(folders, family):
    spec = spec_of(folders / family)
    config = hf_config(spec, "bfloat16")
    assert differences(spec_from_hf_config(config, name="x", source="test"), spec) == ""
    assert config["torch_dtype"] == "bfloat16"


def test_scaled_rotary_positions_survive_the_config(folders):
    scaling = (
        ("factor", 8.0),
        ("high_freq_factor", 4.0),
        ("low_freq_factor", 1.0),
        ("original_max_position_embeddings", 8192.0),
        ("rope_type", "llama3"),
    )
    spec = replace(spec_of(folders / "llama"), rope_scaling=scaling)
    written = hf_config(spec, "bfloat16")
    assert written["rope_scaling"]["rope_type"] == "llama3"


def test_a_model_that_no_config_can_say_is_refused(folders):
    odd = replace(spec_of(folders / "qwen2"), attention_output_bias=True)
    with pytest.raises(ValueError, match=r"no plain qwen2: .*attention_output_bias is False there"):
        hf_config(odd, "bfloat16")
    with pytest.raises(ValueError, match="no config is written for architecture 'bloom'"):
        hf_config(replace(odd, architecture="bloom"), "bfloat16")


# Refusals.


def copied(folders, family, tmp_path):
    """Return a single-file copy of a folder, and its tensors to change."""
    values = {}
    for path in sorted((folders / family).glob("*.safetensors")):
        values.update(load_file(path))
    (tmp_path / "config.json").write_text((folders / family / "config.json").read_text())
    return values


def refused(folder, spec, values, message):
    save_file(values, folder / "model.safetensors")
    with open_tensors(folder) as tensors, pytest.raises(ValueError, match=message):
        check_tensors(tensors, spec, parameter_shapes(spec))


def test_weights_that_do_not_fit_are_refused_by_name(folders, tmp_path):
    spec = spec_of(folders / "llama")
    values = copied(folders, "llama", tmp_path)
    key = "model.layers.0.self_attn.q_proj"
    missing = {name: v for name, v in values.items() if name != f"{key}.weight"}
    refused(tmp_path, spec, missing, rf"has no {key}\.weight")
    wrong = {**values, f"{key}.weight": torch.zeros(16, 8)}
    refused(tmp_path, spec, wrong, r"has shape \(16, 8\), the plan's model needs \(16, 16\)")
    more = {**values, f"{key}.bias": torch.zeros(16)}
    refused(
        tmp_path, spec, more, rf"has {key}\.bias, which the plan's model llama does not use \(1"
    )
    packed = {**values, f"{key}.weight": torch.zeros(16, 16).to(torch.float8_e4m3fn)}
    refused(tmp_path, spec, packed, "is F8_E4M3; weights are read from BF16, F16, F32, F64")


def test_another_models_config_is_refused_with_both_values(folders):
    spec = spec_of(folders / "llama")
    with pytest.raises(ValueError, match="num_layers is 2 there and 3 here; rope_theta is"):
        check_config(folders / "llama", replace(spec, num_layers=3, rope_theta=5e5))
    check_config(folders / "llama", replace(spec, name="other", training_seq_len=4))


def test_folders_without_weights_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no such folder"), open_tensors(tmp_path / "nowhere"):
        pass
    with (
        pytest.raises(ValueError, match=r"has neither model\.safetensors nor"),
        open_tensors(tmp_path),
    ):
        pass
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with (
        pytest.raises(ValueError, match=r"pickled \.bin files are not read"),
        open_tensors(tmp_path),
    ):
        pass


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../model.safetensors"}, "is no file of that folder"),
        ({"a": 3}, "is no file of that folder"),
        ({"a": "gone.safetensors"}, "gone.safetensors: it is not there"),
        ({"b": "one.safetensors"}, "says that b is in one.safetensors, where it is not"),
        ({"a": "cut.safetensors"}, "cannot read .*cut.safetensors"),
        ({}, "has no weight_map"),
    ],
)
def test_bad_indexes_and_files_are_refused(tmp_path, weight_map, message):
    save_file({"a": torch.zeros(100)}, tmp_path / "one.safetensors")
    content = (tmp_path / "one.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(content[:100])
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=message), open_tensors(tmp_path):
        pass


# Writing.


def entries(values, dtype=torch.bfloat16):
    return [
        TensorEntry(name=n, shape=tuple(v.shape), dtype=dtype, values=lambda v=v: v)
        for n, v in values.items()
    ]


def test_files_are_split_by_size_and_read_by_safetensors(tmp_path):
    values = {name: torch.randn(10, 10) for name in "abcde"}  # 200 bytes each in bf16
    write_tensors(tmp_path, entries(values), file_bytes=450)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 1000
    assert sorted(set(index["weight_map"].values())) == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], values[name].bfloat16())


def test_a_failed_export_leaves_no_folder(folders, tmp_path):
    load_and_save(folders / "llama", layout(), tmp_path)
    checkpoint = tmp_path / step_name(0)
    data = next(checkpoint.glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged"):
        export(checkpoint, tmp_path / "out", dtype=torch.float32)
    assert not list(tmp_path.glob("*out*")) + list(tmp_path.glob(".*out*"))


def test_the_command_says_what_is_wrong_and_takes_config_and_tokenizer_along(
    folders, tmp_path, capsys
):
    load_and_save(folders / "qwen2", layout(), tmp_path)
    like = tmp_path / "like"
    like.mkdir()
    (like / "config.json").write_text((folders / "qwen2" / "config.json").read_text())
    (like / "tokenizer.json").write_text("{}")
    checkpoint, output = str(tmp_path / step_name(0)), tmp_path / "out"
    assert main([str(tmp_path), "-o", str(output)]) == 2
    assert "error: there is no checkpoint in" in capsys.readouterr().err
    assert main([checkpoint, "-o", str(output), "--like", str(folders / "llama")]) == 2
    assert "architecture is llama there and qwen2 here" in capsys.readouterr().err
    assert main([checkpoint, "-o", str(output), "--like", str(like)]) == 0
    names = sorted(path.name for path in output.iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    assert main([checkpoint, "-o", str(output)]) == 2
    assert "is there; name a new folder" in capsys.readouterr().err
