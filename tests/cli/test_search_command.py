"""`planner search` as people and scripts run it."""

import json

import pytest

from planner.cli import main
from planner.cli.search import TOP
from planner.plan import read_plan

SMALL = [
    "--model",
    "20m",
    "--hardware",
    "cpu-gloo",
    "--seq-len",
    "256",
    "--global-batch-size",
    "64",
]
FLAGS = {
    "data_parallel": "--dp",
    "tensor_parallel": "--tp",
    "pipeline_parallel": "--pp",
    "context_parallel": "--cp",
    "zero_stage": "--zero",
    "zero_group": "--zero-group",
    "micro_batch_size": "--mbs",
    "stages_per_rank": "--vpp",
    "schedule": "--schedule",
    "recompute": "--recompute",
    "context_parallel_type": "--cp-type",
    "offload": "--offload",
}


def answer(capsys, *words):
    status = main(["search", *words, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_the_answer_has_the_contracts_keys_and_ranks_by_speed(capsys):
    status, found = answer(capsys, *SMALL, "--gpus", "4")
    assert status == 0
    assert found["schema"] == 1
    assert found["status"] == "optimal"
    assert found["nearest_miss"] is None
    assert found["smallest_gpus_that_fit"] is None
    assert [plan["rank"] for plan in found["plans"]] == list(range(1, len(found["plans"]) + 1))
    steps = [plan["time"]["step_seconds"] for plan in found["plans"]]
    assert steps == sorted(steps)
    assert all(plan["verdict"] == "fits" for plan in found["plans"])
    assert found["num_layouts"] == found["num_legal"] + sum(
        count for rule, count in found["rejected"].items() if rule != "device_memory"
    )


def test_estimate_of_every_listed_layout_returns_the_same_numbers(capsys):
    _, found = answer(capsys, *SMALL, "--gpus", "4")
    for plan in found["plans"]:
        layout = plan["layout"]
        words = [w for name, flag in FLAGS.items() for w in (flag, str(layout[name]))]
        words += ["--layers-per-stage", ",".join(map(str, layout["layers_per_stage"]))]
        if layout["recompute_layers"]:
            words += ["--recompute-layers", str(layout["recompute_layers"])]
        words += ["--keep-gathered"] * layout["keep_gathered"]
        words.append(f"--{'' if layout['sequence_parallel'] else 'no-'}sequence-parallel")
        assert main(["estimate", *SMALL, "--gpus", "4", *words, "--json"]) == 0
        judged = json.loads(capsys.readouterr().out)
        if layout["rank_order"] == ["tp", "cp", "dp", "pp"]:  # flags cannot state another one
            assert judged["time"] == plan["time"]
            assert judged["memory"] == plan["memory"]


def test_the_same_search_writes_the_same_bytes_and_a_readable_plan(capsys, tmp_path):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    for path in (first, second):
        assert main(["search", *SMALL, "--gpus", "2", "-o", str(path)]) == 0
    assert first.read_bytes() == second.read_bytes()
    plan = read_plan(first)
    assert plan.solver.status == "optimal"
    assert plan.estimate["time"]["step_seconds"] > 0
    assert plan.cluster.num_gpus == 2


def test_estimate_of_a_plan_file_returns_what_the_plan_says(capsys, tmp_path):
    path = tmp_path / "plan.json"
    assert main(["search", *SMALL, "--gpus", "2", "-o", str(path)]) == 0
    capsys.readouterr()
    assert main(["estimate", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == read_plan(path).estimate


def test_a_plan_that_is_illegal_for_a_target_is_no_answer(capsys, tmp_path):
    path = tmp_path / "plan.json"
    words = [*SMALL, "--gpus", "4", "--pp", "2", "--zero", "2"]
    assert main(["search", *words, "-o", str(path)]) == 0
    capsys.readouterr()
    assert main(["apply", str(path), "--target", "deepspeed"]) == 1
    said = capsys.readouterr().err
    assert "illegal for deepspeed" in said
    assert "search again with --target deepspeed" in said


def test_constraints_hold_in_every_row(capsys):
    _, found = answer(capsys, *SMALL, "--gpus", "4", "--tp", "2,4", "--zero", "1", "--mbs", "1..4")
    assert found["plans"]
    for plan in found["plans"]:
        assert plan["layout"]["tensor_parallel"] in (2, 4)
        assert plan["layout"]["zero_stage"] == 1
        assert plan["layout"]["micro_batch_size"] <= 4


def test_nothing_fits_names_the_nearest_miss_and_exits_with_1(capsys):
    words = ["--model", "8b", "--gpus", "1", "--seq-len", "4096", "--global-batch-size", "8"]
    status, found = answer(capsys, *words, "--offload", "none")
    assert status == 1
    assert found["status"] == "infeasible"
    assert found["plans"] == []
    assert found["nearest_miss"]["lacking_gib"] > 0
    assert found["nearest_miss"]["relaxations"]


@pytest.mark.parametrize(
    ("flags", "rule", "allowed"),
    [
        (["--tp", "3"], "tensor_parallel_divides_heads", {"tensor_parallel": [1, 2, 4, 8]}),
        (
            ["--zero", "3", "--zero-group", "3"],
            "zero_group_divides_ranks",
            {"zero_group": [1, 2, 4, 8]},
        ),
        (
            ["--precision", "mxfp8"],
            "precision_supported",
            {"precision": ["bf16", "fp16", "fp32", "fp8"]},
        ),
        (  # the layout is legal, the runtime does not execute it
            ["--attention", "unfused", "--cp", "2", "--cp-type", "ring"],
            "merged_attention_is_flash",
            {"context_parallel_type": ["ulysses"], "context_parallel": [1]},
        ),
        (  # the framework runs it, its configuration does not say it
            ["--target", "deepspeed", "--pp", "2"],
            "configuration_has_pipeline",
            {"pipeline_parallel": [1]},
        ),
    ],
)
def test_where_nothing_is_legal_the_rule_and_what_is_legal_are_named(capsys, flags, rule, allowed):
    words = ["--model", "8b", "--gpus", "8", *flags]
    status, found = answer(capsys, *words)
    broken = {violation["rule"]: violation["allowed"] for violation in found["violations"]}
    assert status == 1
    assert broken[rule] == allowed
    assert main(["search", *words]) == 1
    assert rule in capsys.readouterr().out


def test_no_count_of_gpus_helps_a_card_without_the_precision(capsys):
    words = ["--model", "1b", "--hardware", "v100-sxm2-32gb", "--gpus", "auto"]
    assert main(["search", *words]) == 1
    assert "legal here: precision fp16, fp32" in capsys.readouterr().err


def test_auto_finds_the_fewest_gpus(capsys):
    words = ["--model", "8b", "--seq-len", "4096", "--global-batch-size", "64", "--offload", "none"]
    status, found = answer(capsys, *words, "--gpus", "auto")
    fewest = found["smallest_gpus_that_fit"]
    assert status == 0
    assert found["plans"][0]["hardware"]["gpus"] == fewest
    status, _ = answer(capsys, *words, "--gpus", str(fewest - 1))
    assert status == 1


def test_a_sweep_gives_the_best_plan_at_each_count(capsys):
    status, found = answer(capsys, *SMALL, "--gpus", "1..4")
    assert status == 0
    assert sorted(plan["hardware"]["gpus"] for plan in found["plans"]) == [1, 2, 4]
    assert found["smallest_gpus_that_fit"] == 1


def test_the_table_says_why_row_1_wins_and_what_was_proved(capsys):
    assert main(["search", *SMALL, "--gpus", "4"]) == 0
    text = capsys.readouterr().out
    assert "row 1 spends its step on" in text
    assert "row 1 against row 2" in text
    assert "optimal: no layout of this space is predicted faster" in text


@pytest.mark.parametrize("gpus", ["0", "eight", "8..2", "8..", "..8", "auto8", "1.5"])
def test_counts_of_gpus_that_make_no_sense_are_refused(capsys, gpus):
    assert main(["search", "--model", "8b", "--gpus", gpus]) == 2
    assert "--gpus" in capsys.readouterr().err


def test_a_job_that_apply_will_refuse_is_named_beside_its_plans(capsys):
    one = ["search", *SMALL, "--gpus", "1", "--json"]
    main([*one, "--precision", "fp16"])
    assert "note: the native runtime does not run this job: it trains in" in capsys.readouterr().err
    main([*one, "--precision", "fp32"])
    assert "note:" not in capsys.readouterr().err


def test_a_sweep_names_a_reason_once(capsys):
    main(["search", *SMALL, "--gpus", "1..2", "--precision", "fp16", "--optimizer", "adamw-8bit"])
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note:")]
    assert len(notes) == 2
    assert "it trains in" in notes[0]
    assert "adamw-8bit" in notes[1]


def test_a_ranking_that_is_asked_for_is_the_usual_one(capsys):
    _, usual = answer(capsys, *SMALL, "--gpus", "2")
    _, asked = answer(capsys, *SMALL, "--gpus", "2", "--top", str(TOP))
    assert asked["plans"] == usual["plans"]
    assert usual["memory_front"] == []
    assert asked["memory_front"][0]["layout"] == asked["plans"][0]["layout"]
