"""Megatron-LM arguments, read the way Megatron reads them."""

import re

import pytest
from emit_plans import Planned, file_of, planned
from hypothesis import given
from hypothesis import strategies as st

from costmodels.job import Optimizer, Precision, Switches, Target
from costmodels.layout import ContextParallelType, Layout, Offload, Recompute, Schedule
from planner.emit import CannotExpress, emit
from planner.emit.megatron.parallel import parallel_options, pipeline_layout
from planner.presets import read_model


def arguments(plan: Planned) -> dict[str, tuple[str, ...]]:
    """Return the options of pretrain_gpt.py with their values."""
    words = emit(plan, Target.MEGATRON).command
    words = words[words.index("pretrain_gpt.py") + 1 :]
    options: dict[str, tuple[str, ...]] = {}
    for word in words:
        if word.startswith("--"):
            name = word
            assert name not in options, f"{name} twice"
            options[name] = ()
        else:
            options[name] += (word,)
    return options


def parsed_layout(text: str) -> tuple[int, ...]:
    """Count the layers of each stage as PipelineParallelLayerLayout.parse_str_to_list does."""
    text = re.sub(r"(.)\*(\d+)", lambda found: found[1] * int(found[2]), text)
    stages = text.split("|")
    assert stages[0][0] == "E"
    assert stages[-1][-1] == "L"
    assert text.count("E") == text.count("L") == 1
    return tuple(stage.count("t") for stage in stages)


def stages_as_megatron_builds_them(
    options: dict[str, tuple[str, ...]], num_layers: int, stages: int
) -> tuple[int, ...]:
    """Follow Megatron's rules from options to layers per global stage."""
    if "--pipeline-model-parallel-layout" in options:
        return parsed_layout(options["--pipeline-model-parallel-layout"][0])
    first = options.get("--decoder-first-pipeline-num-layers")
    last = options.get("--decoder-last-pipeline-num-layers")
    rest = num_layers - sum(int(count[0]) for count in (first, last) if count)
    middle = stages - (first is not None) - (last is not None)
    assert rest % middle == 0, "Megatron would refuse or drop layers"
    split = [rest // middle] * middle
    return (
        *([int(first[0])] if first else []),
        *split,
        *([int(last[0])] if last else []),
    )


@given(
    split=st.lists(st.integers(1, 9), min_size=2, max_size=6),
    per_rank=st.sampled_from([1, 2]),
)
def test_megatron_builds_the_stages_of_the_plan(split: list[int], per_rank: int) -> None:
    stages = tuple(split[: len(split) // per_rank * per_rank])
    pipeline = len(stages) // per_rank
    layout = Layout(
        pipeline_parallel=pipeline,
        stages_per_rank=per_rank,
        schedule=Schedule.INTERLEAVED if per_rank > 1 else Schedule.ONE_F_ONE_B,
        layers_per_stage=stages,
    )
    options = {option[0]: option[1:] for option in parallel_options(read_model("8b"), JOB, layout)}
    assert not UNEVEN & set(options) or pipeline > 1
    if pipeline > 1:
        assert stages_as_megatron_builds_them(options, sum(stages), len(stages)) == stages


JOB = planned().job
UNEVEN = {
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--pipeline-model-parallel-layout",
}


def test_one_stage_never_states_its_layers() -> None:
    assert not any("first" in name or "last" in name for name in arguments(planned(zero_stage=1)))
    assert not UNEVEN & set(arguments(planned(zero_stage=1)))


@pytest.mark.parametrize(
    ("model", "gpus", "split", "stated"),
    [
        ("qwen3-235b-a22b", 16, (24, 24, 24, 22), {"last": "22"}),
        ("8b", 8, (7, 9, 9, 7), {"first": "7", "last": "7"}),
        ("8b", 8, (5, 9, 9, 9), {"first": "5"}),
        ("8b", 8, (8, 8, 8, 8), {}),
    ],
)
def test_uneven_ends_are_stated(
    model: str, gpus: int, split: tuple[int, ...], stated: dict[str, str]
) -> None:
    options = arguments(planned(model, gpus, pipeline_parallel=4, layers_per_stage=split))
    found = {
        end: options[f"--decoder-{end}-pipeline-num-layers"][0]
        for end in ("first", "last")
        if f"--decoder-{end}-pipeline-num-layers" in options
    }
    assert found == stated


def test_a_split_that_no_end_explains_is_a_layout() -> None:
    options = arguments(planned(pipeline_parallel=4, layers_per_stage=(7, 8, 9, 8)))
    assert options["--pipeline-model-parallel-layout"] == ("Et*7|t*8|t*9|t*8L",)
    assert parsed_layout(pipeline_layout((1, 2, 3))) == (1, 2, 3)


def test_interleaved_stages_state_layers_per_chunk() -> None:
    options = arguments(
        planned(pipeline_parallel=4, stages_per_rank=2, schedule=Schedule.INTERLEAVED)
    )
    assert options["--num-layers-per-virtual-pipeline-stage"] == ("4",)
    assert not UNEVEN & set(options)


def test_the_network_of_llama_is_described_to_the_last_option() -> None:
    options = arguments(planned("8b"))
    expected = {
        "--num-layers": ("32",),
        "--hidden-size": ("4096",),
        "--ffn-hidden-size": ("14336",),
        "--num-attention-heads": ("32",),
        "--group-query-attention": (),
        "--num-query-groups": ("8",),
        "--normalization": ("RMSNorm",),
        "--position-embedding-type": ("rope",),
        "--rotary-base": ("500000",),
        "--swiglu": (),
        "--disable-bias-linear": (),
        "--untie-embeddings-and-output-weights": (),
    }
    assert {name: options[name] for name in expected} == expected
    assert "--kv-channels" not in options


def test_gpt_has_megatron_s_default_biases_activation_and_learned_positions() -> None:
    options = arguments(planned("gpt-2", job={"seq_len": 1024}))
    assert options["--position-embedding-type"] == ("learned_absolute",)
    assert options["--normalization"] == ("LayerNorm",)
    assert not {"--swiglu", "--disable-bias-linear", "--rotary-base"} & set(options)
    assert "--untie-embeddings-and-output-weights" not in options
    with pytest.raises(CannotExpress, match="sequences of 4096 with 1024 learned positions"):
        arguments(planned("gpt-2"))


def test_qwen_has_biases_on_queries_keys_and_values_only() -> None:
    options = arguments(planned("qwen2.5-7b"))
    assert {"--disable-bias-linear", "--add-qkv-bias"} <= set(options)


def test_deepseek_routes_as_its_report_says() -> None:
    options = arguments(planned("deepseek-v3", 64, zero_stage=1, expert_parallel=8))
    assert options["--moe-layer-freq"] == ("([0]*3+[1]*58)",)
    assert options["--moe-router-topk"] == ("8",)
    assert options["--moe-router-num-groups"] == ("8",)
    assert options["--moe-router-group-topk"] == ("4",)
    assert options["--moe-shared-expert-intermediate-size"] == ("2048",)
    assert options["--qk-head-dim"] == ("128",)
    assert options["--qk-pos-emb-head-dim"] == ("64",)
    assert options["--expert-model-parallel-size"] == ("8",)
    assert options["--expert-tensor-parallel-size"] == ("1",)
    assert "--mtp-num-layers" not in options


def test_windows_count_the_tokens_before_their_own() -> None:
    options = arguments(planned("gpt-oss-20b", zero_stage=1))
    assert options["--window-size"] == ("127,0",)
    assert options["--window-attn-skip-freq"] == ("2",)
    assert options["--softmax-type"] == ("learnable",)


@pytest.mark.parametrize(
    ("model", "what"),
    [
        ("gemma-2-9b", "4 norms per layer"),
        ("olmo-2-13b", "norms over all queries and keys"),
        ("gpt-neox-20b", "parallel attention and feed-forward blocks"),
    ],
)
def test_networks_that_megatron_has_no_options_for_are_refused(model: str, what: str) -> None:
    with pytest.raises(CannotExpress, match=what):
        emit(planned(model, job={"seq_len": 2048}), Target.MEGATRON)


def test_the_vocabulary_is_padded_to_128_rows_per_tensor_rank() -> None:
    plan = planned("gpt-2", job={"seq_len": 1024}, tensor_parallel=4)
    assert arguments(plan)["--padded-vocab-size"] == ("50688",)


def test_sequence_parallelism_needs_a_tensor_axis() -> None:
    assert "--sequence-parallel" in arguments(planned(tensor_parallel=2))
    assert "--sequence-parallel" not in arguments(
        planned(tensor_parallel=2, sequence_parallel=False)
    )
    assert "--sequence-parallel" not in arguments(planned(sequence_parallel=True))


@pytest.mark.parametrize(
    ("stage", "there", "absent"),
    [
        (0, set(), {"--use-distributed-optimizer", "--use-megatron-fsdp"}),
        (1, {"--use-distributed-optimizer"}, {"--use-megatron-fsdp"}),
        (2, {"--use-megatron-fsdp", "--ckpt-format"}, set()),
        (3, {"--use-megatron-fsdp", "--ckpt-format"}, set()),
    ],
)
def test_zero_stages_are_the_distributed_optimizer_or_fsdp(
    stage: int, there: set[str], absent: set[str]
) -> None:
    options = set(arguments(planned(zero_stage=stage)))
    assert there <= options
    assert not absent & options
    assert "--overlap-grad-reduce" in options


def test_one_rank_has_nothing_to_overlap_but_keeps_its_optimizer() -> None:
    options = set(arguments(planned(gpus=1, zero_stage=1, offload=(Offload.OPTIMIZER,))))
    assert {"--use-distributed-optimizer", "--optimizer-cpu-offload"} <= options
    assert not {"--overlap-grad-reduce", "--overlap-param-gather"} & options


def test_groups_of_shards_are_copies_of_the_optimizer() -> None:
    options = arguments(planned(gpus=16, zero_stage=1, zero_group=8))
    assert options["--num-distributed-optimizer-instances"] == ("2",)


def test_recompute_method_and_count_come_together() -> None:
    full = arguments(planned(recompute=Recompute.FULL))
    assert full["--recompute-granularity"] == ("full",)
    assert full["--recompute-method"] == ("uniform",)
    assert full["--recompute-num-layers"] == ("1",)
    some = arguments(planned(recompute=Recompute.FULL, recompute_layers=5))
    assert some["--recompute-method"] == ("block",)
    assert some["--recompute-num-layers"] == ("5",)
    selective = arguments(planned(recompute=Recompute.SELECTIVE))
    assert selective["--recompute-modules"] == ("core_attn",)
    assert not {"--recompute-method", "--recompute-num-layers"} & set(selective)
    assert not [name for name in arguments(planned()) if "recompute" in name]


def test_connections_are_one_where_megatron_asserts_it_and_not_under_fsdp() -> None:
    def connections(**layout: object) -> str | None:
        environment = emit(planned(**layout), Target.MEGATRON).to_json()["environment"]
        return environment.get("CUDA_DEVICE_MAX_CONNECTIONS")

    assert connections(tensor_parallel=2) == "1"
    assert connections(context_parallel=2) == "1"
    assert connections(zero_stage=3, tensor_parallel=2) is None
    assert connections(tensor_parallel=2, hardware="b200-sxm-180gb") is None
    assert connections() is None


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        (ContextParallelType.RING, "p2p"),
        (ContextParallelType.ULYSSES, "a2a"),
        (ContextParallelType.ALL_GATHER, "allgather"),
    ],
)
def test_context_parallel_types_have_their_words(kind: ContextParallelType, word: str) -> None:
    options = arguments(planned(context_parallel=2, context_parallel_type=kind))
    assert options["--cp-comm-type"] == (word,)


def test_number_formats_are_stated_with_their_recipe() -> None:
    def formats(precision: Precision) -> dict[str, tuple[str, ...]]:
        options = arguments(planned(job={"precision": precision}))
        return {k: v for k, v in options.items() if re.match("--(bf16|fp16|fp8|fp4)", k)}

    assert formats(Precision.FP32) == {}
    assert formats(Precision.BF16) == {"--bf16": ()}
    assert formats(Precision.FP8)["--fp8-recipe"] == ("tensorwise",)


def test_eight_bit_moments_and_offload_need_the_precision_aware_optimizer_once() -> None:
    options = arguments(
        planned(
            zero_stage=1,
            offload=(Offload.OPTIMIZER,),
            job={"optimizer": Optimizer.ADAMW_8BIT},
        )
    )
    assert options["--exp-avg-dtype"] == ("fp8",)
    assert {"--use-precision-aware-optimizer", "--optimizer-cpu-offload"} <= set(options)


@pytest.mark.parametrize(
    ("job", "what"),
    [
        ({"lora_rank": 8}, "adapters"),
        ({"chunked_loss": True}, "chunked loss"),
        ({"optimizer": Optimizer.ADAMW_BF16}, "without fp32 master weights"),
        ({"optimizer": Optimizer.ADAMW_8BIT}, "8-bit moments"),
    ],
)
def test_jobs_that_megatron_has_no_options_for_are_refused(
    job: dict[str, object], what: str
) -> None:
    with pytest.raises(CannotExpress, match=what):
        emit(planned(job=job), Target.MEGATRON)


def test_ranks_may_be_ordered_with_the_pipeline_before_data() -> None:
    options = arguments(planned(pipeline_parallel=2, rank_order=("tp", "cp", "pp", "dp")))
    assert "--use-tp-pp-dp-mapping" in options
    with pytest.raises(CannotExpress, match="rank order pp,tp,cp,dp"):
        emit(planned(rank_order=("pp", "tp", "cp", "dp")), Target.MEGATRON)


def test_graphs_exclude_full_recomputation_and_expandable_segments() -> None:
    graphs = {"switches": Switches(cuda_graphs=True)}
    emission = emit(planned(job=graphs), Target.MEGATRON)
    assert "expandable_segments" not in file_of(emission, "launch.sh")
    assert "--te-rng-tracker" in emission.command
    with pytest.raises(CannotExpress, match="CUDA graphs with full recomputation"):
        emit(planned(job=graphs, recompute=Recompute.FULL), Target.MEGATRON)
