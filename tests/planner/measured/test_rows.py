"""Rows of measured runs become jobs; what cannot be expressed is said, never dropped."""

import csv
from pathlib import Path

import pytest

from costmodels.job import Precision, Target
from costmodels.layout import Recompute, Schedule
from costmodels.parameters import num_parameters
from planner.measured.columns import UnsupportedRowError
from planner.measured.rows import interpret, target_of
from planner.measured.validate import REQUIRED

RUNS = Path(__file__).parents[2] / "golden" / "measured_runs.csv"


@pytest.fixture(scope="module")
def runs():
    with RUNS.open(newline="") as file:
        return list(csv.DictReader(file))


def first(runs, family, **wanted):
    return next(
        run
        for run in runs
        if run["family"] == family and all(run[key] == value for key, value in wanted.items())
    )


def test_every_scored_run_can_be_expressed(runs):
    for run in runs:
        assert interpret(run).layouts, run["id"]


def test_every_layout_fills_the_gpus_and_the_batch(runs):
    for run in runs:
        asked = interpret(run)
        for layout in asked.layouts:
            assert layout.num_gpus == int(run["gpus"]), run["id"]
            assert layout.global_batch_size == asked.job.global_batch_size, run["id"]
            assert sum(layout.layers_per_stage) == int(run["layers"]), run["id"]


def test_parameter_counts_are_those_that_the_sources_state(runs):
    """Within 1 %; MPT's stated sizes count the tied embedding twice, so they are left out."""
    for run in runs:
        if run["params_b"] and not run["model"].startswith("MPT"):
            counted = num_parameters(interpret(run).model)
            assert counted == pytest.approx(float(run["params_b"]) * 1e9, rel=0.01), run["id"]


def test_a_stated_row_means_exactly_one_layout(runs):
    run = first(runs, "aleph-alpha/65B-2k", tp="2", pp="4", recompute="full")
    asked = interpret(run)
    (layout,) = asked.layouts
    assert asked.job.target is Target.DEEPSPEED
    assert layout.recompute is Recompute.FULL
    assert layout.tensor_parallel == 2
    assert layout.pipeline_parallel == 4
    assert layout.schedule is Schedule.ONE_F_ONE_B
    assert asked.note == ""


def test_a_silent_recompute_stays_open_and_is_said(runs):
    run = first(runs, "dgxc/Llama-3.1-70B-H100")
    asked = interpret(run)
    assert {layout.recompute for layout in asked.layouts} == set(Recompute)
    assert "recompute not stated" in asked.note


def test_network_bandwidth_comes_from_the_row_in_bits(runs):
    run = first(runs, "dgxc/Llama-3.1-70B-H100", inter_node_gbps_per_gpu="400")
    assert interpret(run).cluster.profile.inter_node.bandwidth == pytest.approx(50e9)


def test_query_compression_follows_from_the_stated_size(runs):
    small = interpret(first(runs, "mbridge-skills/moonlight")).model.latent_attention
    large = interpret(first(runs, "simumax/dsv2")).model.latent_attention
    assert small.q_lora_rank is None
    assert large.q_lora_rank == 1536


def test_embedding_and_head_count_as_layers_where_the_row_says_so(runs):
    tagged = [r for r in runs if "embedding-and-head-count-as-layers" in r["switches"]]
    run = next(r for r in tagged if r["pp"] != "1" and (int(r["layers"]) + 2) % int(r["pp"]) == 0)
    (split,) = {layout.layers_per_stage for layout in interpret(run).layouts}
    assert split[0] == split[1] - 1
    assert split[-1] == split[1] - 1


def test_aleph_alphas_stages_are_cut_from_a_list_that_holds_the_ends(runs):
    run = first(runs, "aleph-alpha/65B-2k", pp="8")
    (split,) = {layout.layers_per_stage for layout in interpret(run).layouts}
    # Embedding, 80 blocks, norm and head: 83 entries, 11 on each of the first three stages.
    assert split == (10, 11, 11, 10, 10, 10, 10, 8)
    assert interpret(run).job.switches.separate_gates


def test_a_sharding_group_is_read_from_behind_the_slash(runs):
    run = first(runs, "internevo/7B-zero-tp-grid", zero="1/8")
    (layout,) = interpret(run).layouts
    assert layout.zero_stage == 1
    assert layout.zero_group == 8


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"gpu": "TPU-v5"}, "TPU-v5"),
        ({"attention": "hybrid-mamba2"}, "hybrid-mamba2"),
        ({"schedule": "v-half"}, "v-half"),
        ({"precision": "int4"}, "int4"),
        ({"hidden": ""}, "hidden"),
        ({"layers": "many"}, "many"),
        ({"global_batch": "7"}, "7"),
    ],
)
def test_what_cannot_be_expressed_says_why(runs, change, word):
    run = first(runs, "aleph-alpha/65B-2k", dp="2")
    with pytest.raises(UnsupportedRowError, match=word):
        interpret({**run, **change})


def test_a_silent_torchtitan_pipeline_has_a_micro_batch_for_each_rank(runs):
    run = first(runs, "torchtitan/H100-2024-12", pp="8", seq_len="8192")
    asked = interpret(run)
    # 256 sequences over 8 replicas, in 8 micro-batches of 4.
    assert {one.num_micro_batches for one in asked.layouts} == {8}
    assert {one.micro_batch_size for one in asked.layouts} == {4}
    assert "micro-batch not stated" in asked.note


@pytest.mark.parametrize(
    ("family", "kernel", "gradients"),
    [("llm-foundry/H100-80", "flash-2", "fp32"), ("ibm-fms-fsdp/H100", "flash-2", None)],
)
def test_unnamed_kernels_and_wide_gradients_are_read(runs, family, kernel, gradients):
    job = interpret(first(runs, family)).job
    assert (job.switches.attention_kernel, job.grad_dtype) == (kernel, gradients)


def test_speed_tables_of_expert_models_even_their_routing_out(runs):
    assert interpret(first(runs, "moe-modelzoo/H100")).job.switches.balanced_routing


def test_an_open_fp8_or_fp4_log_is_taken_as_fp4_and_said(runs):
    asked = interpret(next(run for run in runs if run["precision"] == "fp8|nvfp4"))
    assert asked.job.precision is Precision.NVFP4
    assert "fp8|nvfp4" in asked.note


@pytest.mark.parametrize(
    ("framework", "target"),
    [
        ("Megatron-DeepSpeed", Target.DEEPSPEED),
        ("Megatron-Bridge/Megatron-Core", Target.MEGATRON),
        ("torchtitan", Target.TORCHTITAN),
        ("llm-foundry (Composer + PyTorch FSDP)", Target.ACCELERATE),
        ("something new", Target.MEGATRON),
    ],
)
def test_a_framework_selects_the_nearest_target(framework, target):
    assert target_of(framework) is target


def test_the_golden_table_has_what_predictions_read(runs):
    assert set(REQUIRED) <= set(runs[0])


def test_silent_rows_overlap_what_their_software_does_unless_told(runs):
    switches = interpret(first(runs, "narayanan2021/table1")).job.switches
    assert not switches.overlap_grad_reduce
    assert not switches.overlap_tensor_parallel
    assert not interpret(first(runs, "bloom/h14336")).job.switches.overlap_grad_reduce
    tuned = interpret(first(runs, "dgxc/GPT-3-175B-H100")).job.switches
    assert tuned.overlap_grad_reduce
    assert tuned.overlap_tensor_parallel
    quiet = interpret(first(runs, "simumax/llama70b")).job.switches
    assert not quiet.overlap_grad_reduce
    assert not quiet.overlap_tensor_parallel
