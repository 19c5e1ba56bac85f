"""The config files of torchtitan, DeepSpeed, nanotron and Accelerate, parsed and checked."""

import json
import tomllib
from itertools import accumulate, chain
from typing import Any

import pytest
from emit_plans import Planned, file_of, planned
from hypothesis import given
from hypothesis import strategies as st

from costmodels.hf_families import FAMILIES
from costmodels.job import Optimizer, Precision, Switches, Target
from costmodels.layout import ContextParallelType, Offload, Recompute, Schedule
from planner.emit import CannotExpress, emit
from planner.emit.accelerate import LAYER_CLASSES
from planner.emit.torchtitan import FLAVORS, modules_of_stages
from planner.presets import presets, read_model
from planner.rules.own_splits import nanotron_split


def toml_of(plan: Planned) -> dict[str, Any]:
    return tomllib.loads(file_of(emit(plan, Target.TORCHTITAN), "torchtitan.toml"))


def json_of(plan: Planned) -> dict[str, Any]:
    return json.loads(file_of(emit(plan, Target.DEEPSPEED), "ds_config.json"))


def yaml_of(plan: Planned, target: Target) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load(file_of(emit(plan, target), f"{target.value}.yaml"))


# torchtitan


@pytest.mark.parametrize(
    ("preset", "flavor"),
    [
        ("8b", ("llama3", "8B")),
        ("70b", ("llama3", "70B")),
        ("405b", ("llama3", "405B")),
        ("qwen3-8b", ("qwen3", "8B")),
        ("qwen3-32b", ("qwen3", "32B")),
        ("qwen3-30b-a3b", ("qwen3", "30B-A3B")),
        ("qwen3-235b-a22b", ("qwen3", "235B-A22B")),
        ("deepseek-v2-lite", ("deepseek_v3", "16B")),
        ("deepseek-v3", ("deepseek_v3", "671B")),
    ],
)
def test_torchtitan_knows_these_presets_by_flavor(preset: str, flavor: tuple[str, str]) -> None:
    table = toml_of(planned(preset, zero_stage=3))["model"]
    assert (table["name"], table["flavor"]) == flavor


def test_torchtitan_flavors_are_unique_and_other_shapes_are_refused() -> None:
    assert len(set(FLAVORS.values())) == len(FLAVORS)
    with pytest.raises(CannotExpress, match="Llama-2-7B: its shape is none of llama3 8B"):
        toml_of(planned("7b", zero_stage=3))


def test_torchtitan_degrees_fill_the_gpus() -> None:
    plan = planned(gpus=32, zero_stage=3, zero_group=4, tensor_parallel=2, context_parallel=2)
    table = toml_of(plan)["parallelism"]
    assert table["data_parallel_replicate_degree"] == 4
    assert table["data_parallel_shard_degree"] == 2  # groups of 4 ranks, context included
    assert 4 * 2 * table["tensor_parallel_degree"] * table["context_parallel_degree"] == 32


def test_torchtitan_batch_is_a_micro_batch_or_all_those_of_a_pipeline() -> None:
    alone = toml_of(planned(zero_stage=3, micro_batch_size=2))
    assert alone["training"]["local_batch_size"] == 2
    assert alone["training"]["global_batch_size"] == 64
    piped = toml_of(planned(zero_stage=3, micro_batch_size=2, pipeline_parallel=2))
    assert piped["training"]["local_batch_size"] == 16
    assert piped["parallelism"]["pipeline_parallel_microbatch_size"] == 2
    assert piped["training"]["global_batch_size"] == 16 * 4


@given(st.lists(st.integers(1, 5), min_size=2, max_size=6))
def test_torchtitan_stages_hold_every_module_once_and_in_order(split: list[int]) -> None:
    stages = modules_of_stages(tuple(split))
    assert list(chain.from_iterable(stages)) == [
        "tok_embeddings",
        *(f"layers.{layer}" for layer in range(sum(split))),
        "norm",
        "output",
    ]
    assert [sum(name.startswith("layers.") for name in stage) for stage in stages] == split


@pytest.mark.parametrize(
    ("schedule", "per_rank", "word"),
    [
        (Schedule.GPIPE, 1, "GPipe"),
        (Schedule.ONE_F_ONE_B, 1, "1F1B"),
        (Schedule.INTERLEAVED, 2, "Interleaved1F1B"),
        (Schedule.ZERO_BUBBLE, 2, "InterleavedZeroBubble"),
        (Schedule.ZBV, 2, "ZBVZeroBubble"),
        (Schedule.DUALPIPEV, 2, "DualPipeV"),
    ],
)
def test_torchtitan_schedules_have_torch_s_names(
    schedule: Schedule, per_rank: int, word: str
) -> None:
    plan = planned(zero_stage=3, pipeline_parallel=2, stages_per_rank=per_rank, schedule=schedule)
    table = toml_of(plan)["parallelism"]
    assert table["pipeline_parallel_schedule"] == word
    assert len(table["module_fqns_per_model_part"]) == 2 * per_rank


def test_torchtitan_keeps_parameters_under_zero_2() -> None:
    assert toml_of(planned(zero_stage=2))["parallelism"]["fsdp_reshard_after_forward"] == "never"
    assert toml_of(planned(zero_stage=3))["parallelism"]["fsdp_reshard_after_forward"] == "default"


def test_torchtitan_quantises_all_but_the_head_and_compiles() -> None:
    tables = toml_of(planned(zero_stage=3, job={"precision": Precision.FP8}))
    assert tables["model"]["converters"] == ["quantize.linear.float8"]
    recipe = tables["quantize"]["linear"]["float8"]
    assert recipe == {"recipe_name": "tensorwise", "filter_fqns": ["output"]}
    assert tables["compile"]["enable"] is True
    by_row = {"precision": Precision.FP8, "switches": Switches(rowwise_fp8=True)}
    recipe = toml_of(planned(zero_stage=3, job=by_row))["quantize"]["linear"]["float8"]
    assert recipe == {"recipe_name": "rowwise", "filter_fqns": ["output"]}
    gathered = {"precision": Precision.FP8, "switches": Switches(fp8_all_gather=True)}
    recipe = toml_of(planned(zero_stage=3, job=gathered))["quantize"]["linear"]["float8"]
    assert recipe["recipe_name"] == "tensorwise"
    assert recipe["enable_fsdp_float8_all_gather"] is True


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"tensor_parallel": 2, "sequence_parallel": False}, "without sequence parallelism"),
        ({"tensor_parallel": 2, "zero_stage": 0}, "replicas"),
        ({"recompute": Recompute.FULL, "recompute_layers": 3}, "recomputing 3 layers"),
        ({"context_parallel": 2, "zero_group": 1, "zero_stage": 3}, "ZeRO group of 1"),
        ({"job": {"optimizer": Optimizer.SGD}}, "optimizer sgd"),
        ({"hardware": "b200-sxm-180gb", "job": {"precision": Precision.NVFP4}}, "in nvfp4"),
        ({"job": {"lora_rank": 8}}, "adapters"),
    ],
)
def test_torchtitan_refuses_what_it_has_no_option_for(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(CannotExpress, match=what):
        toml_of(planned(**({"zero_stage": 3} | changes)))


def test_torchtitan_has_no_pipeline_of_qwen3() -> None:
    with pytest.raises(CannotExpress, match="pipeline of Qwen3"):
        toml_of(planned("qwen3-8b", zero_stage=3, pipeline_parallel=2))


# DeepSpeed


def test_deepspeed_batch_sizes_agree() -> None:
    config = json_of(planned(gpus=16, batch=96, micro_batch_size=3, zero_stage=1))
    assert config["train_batch_size"] == 96
    assert (
        config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 16 == 96
    )


def test_deepspeed_offload_devices_follow_the_plan() -> None:
    both = json_of(planned(zero_stage=3, offload=(Offload.OPTIMIZER, Offload.PARAMETERS)))
    assert both["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert both["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    states = json_of(planned(zero_stage=2, offload=(Offload.OPTIMIZER,)))["zero_optimization"]
    assert "offload_param" not in states
    assert "offload_optimizer" not in json_of(planned(zero_stage=2))["zero_optimization"]


def test_deepspeed_gathers_experts_as_one_module_under_zero_3() -> None:
    zero = json_of(planned("qwen3-30b-a3b", zero_stage=3))["zero_optimization"]
    assert zero["leaf_module"]["classes"] == [
        "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock"
    ]
    assert "leaf_module" not in json_of(planned(zero_stage=3))["zero_optimization"]


def test_deepspeed_ulysses_states_both_sizes_of_its_mesh() -> None:
    plan = planned(
        zero_stage=3, context_parallel=2, context_parallel_type=ContextParallelType.ULYSSES
    )
    config = json_of(plan)
    assert (config["sequence_parallel_size"], config["data_parallel_size"]) == (2, 4)
    per_step = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 4
    assert config["train_batch_size"] == per_step


def test_deepspeed_tensor_parallelism_is_autotp() -> None:
    config = json_of(planned(zero_stage=1, tensor_parallel=2, sequence_parallel=False))
    assert config["tensor_parallel"] == {"autotp_size": 2}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"pipeline_parallel": 2, "zero_stage": 1}, "a pipeline"),
        ({"tensor_parallel": 2, "zero_stage": 1}, "AutoTP with sequence parallelism"),
        ({"tensor_parallel": 2, "sequence_parallel": False}, "AutoTP with ZeRO-3"),
        ({"zero_group": 4}, "ZeRO in groups of 4 of 8"),
        ({"recompute": Recompute.SELECTIVE}, "selective recomputation"),
        ({"job": {"precision": Precision.FP8}}, "training in fp8"),
        ({"job": {"optimizer": Optimizer.ADAMW_8BIT}}, "optimizer adamw-8bit"),
    ],
)
def test_deepspeed_refuses_what_its_config_cannot_say(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(CannotExpress, match=what):
        json_of(planned(**({"zero_stage": 3} | changes)))


def test_deepspeed_tells_the_script_to_recompute() -> None:
    command = emit(planned(zero_stage=2, recompute=Recompute.FULL), Target.DEEPSPEED).command
    assert "--gradient_checkpointing" in command
    assert "--gradient_checkpointing" not in emit(planned(zero_stage=2), Target.DEEPSPEED).command


# nanotron


@given(
    preset=st.sampled_from(["7b", "8b", "70b", "qwen2.5-7b", "qwen2.5-72b", "20m"]),
    stages=st.integers(1, 12),
)
def test_nanotron_split_is_that_of_its_threshold_rule(preset: str, stages: int) -> None:
    """Blocks in order, each on the current rank; a rank is full once its share is passed."""
    model = read_model(preset)
    layer = 4 * model.num_attention_heads * model.head_dim * model.hidden_size
    layer += 3 * model.ffn_hidden_size * model.hidden_size
    blocks = [0, *[layer] * model.num_layers, 0, model.vocab_size * model.hidden_size, 0, 0]
    sums = list(accumulate(blocks))
    thresholds = [sums[-1] * ((rank + 1) / stages) for rank in range(stages)]
    rank, counts = 0, [0] * stages
    for place, total in enumerate(sums):
        counts[rank] += 1 <= place <= model.num_layers
        if total > thresholds[rank]:
            rank += 1
    assert nanotron_split(model, stages) == tuple(counts)


def test_nanotron_refuses_another_split_and_names_its_own() -> None:
    with pytest.raises(CannotExpress, match="--layers-per-stage 17,15"):
        emit(planned("7b", pipeline_parallel=2), Target.NANOTRON)


def test_nanotron_degrees_multiply_to_the_world() -> None:
    plan = planned(
        "7b",
        32,
        tensor_parallel=2,
        context_parallel=2,
        pipeline_parallel=2,
        layers_per_stage=(17, 15),
        zero_stage=1,
    )
    table = yaml_of(plan, Target.NANOTRON)["parallelism"]
    assert table["dp"] * table["tp"] * table["pp"] * table["context_parallel_size"] == 32
    assert table["tp_mode"] == "REDUCE_SCATTER"
    assert table["pp_engine"] == "1f1b"


def test_nanotron_describes_the_network_and_the_batch() -> None:
    config = yaml_of(planned("qwen2.5-7b", micro_batch_size=2, zero_stage=1), Target.NANOTRON)
    network = config["model"]["model_config"]
    assert network["is_qwen2_config"] is True
    assert network["attention_bias"] is True
    assert network["num_key_value_heads"] == 4
    assert network["rms_norm_eps"] == 1e-6
    assert config["tokens"]["batch_accumulation_per_replica"] == 4
    assert config["optimizer"]["zero_stage"] == 1
    assert config["optimizer"]["optimizer_factory"]["adam_eps"] == 1e-8


@pytest.mark.parametrize("preset", ["gpt-2", "mixtral-8x7b", "qwen3-8b", "mistral-7b-v0.1"])
def test_nanotron_refuses_networks_without_a_class(preset: str) -> None:
    with pytest.raises(CannotExpress):
        emit(planned(preset, job={"seq_len": 1024}), Target.NANOTRON)


# Accelerate


def test_accelerate_knows_the_layers_of_every_family() -> None:
    assert set(LAYER_CLASSES) == set(FAMILIES)
    assert {read_model(preset.names[0]).architecture for preset in presets()} <= set(LAYER_CLASSES)


def test_accelerate_axes_multiply_to_the_processes() -> None:
    plan = planned(gpus=32, zero_stage=3, zero_group=8, tensor_parallel=2, context_parallel=2)
    config = yaml_of(plan, Target.ACCELERATE)
    sizes = config["parallelism_config"]
    names = ("dp_replicate", "dp_shard", "tp", "cp")
    degrees = [sizes[f"parallelism_config_{name}_size"] for name in names]
    assert degrees == [2, 4, 2, 2]
    assert config["num_processes"] == 32
    assert config["num_machines"] == 4


@pytest.mark.parametrize(
    ("changes", "engine"),
    [
        ({"zero_stage": 0}, "MULTI_GPU"),
        ({"zero_stage": 1}, "DEEPSPEED"),
        ({"zero_stage": 2}, "FSDP"),
        ({"zero_stage": 3}, "FSDP"),
        ({"zero_stage": 2, "offload": (Offload.OPTIMIZER,)}, "DEEPSPEED"),
        ({"zero_stage": 3, "offload": (Offload.OPTIMIZER, Offload.PARAMETERS)}, "FSDP"),
    ],
)
def test_accelerate_picks_the_engine_that_can(changes: dict[str, Any], engine: str) -> None:
    config = yaml_of(planned(**changes), Target.ACCELERATE)
    assert config["distributed_type"] == engine
    assert ("fsdp_config" in config) == (engine == "FSDP")
    assert ("deepspeed_config" in config) == (engine == "DEEPSPEED")


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_accelerate_cuts_by_the_tensor_axis_alone_without_fsdp(stage: int) -> None:
    # FSDP on a mesh without ranks to shard over fails (huggingface/accelerate#3798, #4180).
    plan = planned(zero_stage=stage, tensor_parallel=8, recompute=Recompute.FULL)
    config = yaml_of(plan, Target.ACCELERATE)
    assert config["distributed_type"] == "MULTI_GPU"
    assert "fsdp_config" not in config
    assert config["parallelism_config"]["parallelism_config_tp_size"] == config["num_processes"]
    assert "--gradient_checkpointing" in emit(plan, Target.ACCELERATE).command


def test_accelerate_copies_without_shards_are_ddp() -> None:
    config = yaml_of(planned(zero_stage=3, zero_group=1), Target.ACCELERATE)
    assert config["distributed_type"] == "MULTI_GPU"
    assert "parallelism_config" not in config


def test_accelerate_context_size_is_fsdp_s_and_sequence_size_deepspeed_s() -> None:
    ring = yaml_of(planned(zero_stage=3, context_parallel=2), Target.ACCELERATE)
    assert ring["parallelism_config"]["parallelism_config_cp_comm_strategy"] == "alltoall"
    ulysses = planned(
        zero_stage=3, context_parallel=2, context_parallel_type=ContextParallelType.ULYSSES
    )
    config = yaml_of(ulysses, Target.ACCELERATE)
    assert config["distributed_type"] == "DEEPSPEED"
    assert config["parallelism_config"]["parallelism_config_sp_size"] == 2
    assert "parallelism_config_cp_size" not in config["parallelism_config"]


def test_accelerate_reshards_under_zero_3_only() -> None:
    for stage, reshards in ((2, False), (3, True)):
        config = yaml_of(planned(zero_stage=stage), Target.ACCELERATE)
        assert config["fsdp_config"]["fsdp_reshard_after_forward"] is reshards
        assert config["fsdp_config"]["fsdp_version"] == 2


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"zero_stage": 1, "tensor_parallel": 2}, "tensor parallelism with DeepSpeed"),
        ({"zero_stage": 1, "zero_group": 4}, "groups of 4 of 8"),
        (
            {"zero_stage": 3, "zero_group": 1, "offload": (Offload.OPTIMIZER, Offload.PARAMETERS)},
            "parameters that no ranks share",
        ),
        (
            {"zero_stage": 3, "hardware": "b200-sxm-180gb", "job": {"precision": Precision.MXFP8}},
            "training in mxfp8",
        ),
        ({"zero_stage": 3, "job": {"chunked_loss": True}}, "chunked loss"),
    ],
)
def test_accelerate_refuses_what_no_engine_can(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(CannotExpress, match=what):
        emit(planned(**changes), Target.ACCELERATE)
