"""What is said beside a ranking agrees with the estimates and is true."""

import json
from dataclasses import replace

import pytest

from costmodels.job import TrainingJob
from costmodels.layout import Layout, Offload, Recompute, Schedule, split_layers
from costmodels.profiles.reader import make_cluster, read_profile
from costmodels.units import GB
from planner.cli import main
from planner.constraints import Constraints
from planner.explain.advice import advice, mechanisms
from planner.explain.margins import margins, refitted
from planner.judge import Verdict, judge
from planner.presets import read_model
from planner.search.ranking import search

PLAIN = Constraints(runnable=True, context_parallel=(1,), offload=((),))


def inputs(name, gpus, batch, *settings, seq_len=2048, node=8):
    cluster = make_cluster(read_profile("h100-sxm-80gb", settings), gpus, node)
    return read_model(name), TrainingJob(seq_len=seq_len, global_batch_size=batch), cluster


def layout_of(model, job, gpus, **axes):
    pipeline = axes.get("pipeline_parallel", 1)
    data = gpus // pipeline // axes.get("tensor_parallel", 1)
    return Layout(
        **{
            "data_parallel": data,
            "zero_group": data,
            "micro_batch_size": 1,
            "num_micro_batches": job.global_batch_size // data,
            "layers_per_stage": split_layers(model.num_layers, pipeline),
        }
        | axes
    )


def test_a_model_that_fits_on_each_gpu_is_not_to_be_sharded():
    model, job, cluster = inputs("60m", 4, 64)
    plan = judge(model, job, cluster, layout_of(model, job, 4))
    assert any("do not shard" in words for words in advice(model, job, cluster, [plan], PLAIN))
    cut = judge(model, job, cluster, layout_of(model, job, 4, zero_stage=3))
    assert not any("do not shard" in words for words in advice(model, job, cluster, [cut], PLAIN))


def test_rows_that_the_estimate_cannot_tell_apart_name_the_simplest():
    model, job, cluster = inputs("60m", 4, 64)
    plans = [
        judge(model, job, cluster, layout_of(model, job, 4, zero_stage=zero)) for zero in (3, 1)
    ]
    ties, *_ = advice(model, job, cluster, plans, PLAIN)
    assert "closer than the estimate is sure of" in ties
    assert "row 2 is the simplest" in ties


def test_fewer_stages_per_rank_are_simpler():
    model, job, cluster = inputs("60m", 4, 64)
    pipeline = {"pipeline_parallel": 2, "schedule": Schedule.INTERLEAVED}
    plans = [
        judge(
            model,
            job,
            cluster,
            layout_of(
                model,
                job,
                4,
                **pipeline,
                stages_per_rank=stages,
                layers_per_stage=split_layers(model.num_layers, 2 * stages),
            ),
        )
        for stages in (4, 2)
    ]
    ties, *_ = advice(model, job, cluster, plans, PLAIN)
    assert "row 2 is the simplest" in ties


def test_mechanisms_by_hand():
    model, job, _ = inputs("8b", 16, 64)
    assert mechanisms(layout_of(model, job, 16)) == 0
    busy = layout_of(
        model,
        job,
        16,
        tensor_parallel=2,
        pipeline_parallel=2,
        schedule=Schedule.ZERO_BUBBLE,
        zero_stage=2,
        recompute=Recompute.FULL,
        recompute_layers=3,
        offload=(Offload.OPTIMIZER,),
    )
    # tp, pp, its schedule, ZeRO-2, recomputation, of some layers, offload
    assert mechanisms(busy) == 7


def test_a_pipeline_that_the_batch_does_not_fill_says_which_batch_would():
    model, job, cluster = inputs("8b", 8, 8)
    plan = judge(model, job, cluster, layout_of(model, job, 8, pipeline_parallel=8))
    (words,) = (w for w in advice(model, job, cluster, [plan], PLAIN) if "do not fill" in w)
    assert "8 micro-batches do not fill 8 pipeline ranks" in words
    assert "140 sequences" in words  # (8 - 1) / 140 = 5 %


@pytest.mark.parametrize(
    ("overrides", "layers", "cause"),
    [
        (("links.inter_node.gb_per_s=0.125",), (16, 16), "ranks wait for transfers"),
        ((), (4, 28), "stages are not equally heavy"),
    ],
)
def test_a_full_pipeline_that_waits_says_for_what(overrides, layers, cause):
    model, job, cluster = inputs("8b", 2, 256, *overrides, node=1)
    layout = layout_of(
        model, job, 2, pipeline_parallel=2, num_micro_batches=256, layers_per_stage=layers
    )
    (words,) = (
        w
        for w in advice(model, job, cluster, [judge(model, job, cluster, layout)], PLAIN)
        if "bubble" in w
    )
    assert words.endswith(f"though micro-batches fill the 2 pipeline ranks: {cause}")


def test_two_nodes_that_are_slower_than_one_say_from_which_bandwidth_they_win():
    slow = "links.inter_node.gb_per_s=0.05"
    model, job, cluster = inputs("60m", 4, 64, slow, node=2)
    layout = layout_of(model, job, 4, micro_batch_size=16, num_micro_batches=1)
    plan = judge(model, job, cluster, layout)
    (words,) = (w for w in advice(model, job, cluster, [plan], PLAIN) if "slower than one" in w)
    turn = float(words.split("they win from ")[1].split()[0])
    alone = make_cluster(cluster.profile, 2, 2)
    one = search(model, job, alone, PLAIN, top=1).plans[0].time.step_seconds
    assert one < plan.time.step_seconds
    link = replace(cluster.profile.inter_node, bandwidth=1.01 * turn * GB)
    faster = replace(cluster, profile=replace(cluster.profile, inter_node=link))
    assert judge(model, job, faster, plan.layout).time.step_seconds < one


def test_margins_are_what_estimate_says_of_the_changed_job():
    model, job, cluster = inputs("8b", 8, 64)
    plan = judge(
        model, job, cluster, layout_of(model, job, 8, zero_stage=3, recompute=Recompute.FULL)
    )
    found = {(margin.change, margin.value): margin for margin in margins(model, job, cluster, plan)}
    twice = replace(job, global_batch_size=128)
    said = judge(model, twice, cluster, refitted(plan.layout, twice, cluster))
    assert found["global_batch_size", 128].verdict == said.verdict.value
    lengths = [margin for margin in found.values() if margin.change == "seq_len"]
    assert len(lengths) == 1
    longer = replace(job, seq_len=lengths[0].value)
    assert judge(model, longer, cluster, plan.layout).verdict.value == lengths[0].verdict
    assert {value for change, value in found if change == "gpus"} == {4, 16}


@pytest.mark.parametrize(
    ("gpus", "others"),
    [(1, {2}), (6, {3, 16}), (8, {4, 16}), (16, {8, 32}), (24, {8, 48}), (40, {16, 80})],
)
def test_other_counts_of_gpus_are_whole_nodes(gpus, others):
    model, job, cluster = inputs("60m", gpus, 240)
    plan = judge(model, job, cluster, layout_of(model, job, gpus))
    counts = {m.value for m in margins(model, job, cluster, plan) if m.change == "gpus"}
    assert counts == others


def test_a_change_that_breaks_a_rule_names_it():
    model, job, cluster = inputs("8b", 16, 64)
    axes = {"tensor_parallel": 8, "pipeline_parallel": 2, "sequence_parallel": True}
    plan = judge(model, job, cluster, layout_of(model, job, 16, **axes))
    (fewer,) = (m for m in margins(model, job, cluster, plan) if (m.change, m.value) == ("gpus", 8))
    assert fewer.verdict == Verdict.ILLEGAL.value
    assert "degrees_fill_the_gpus" in fewer.says


def searched(capsys, *wanted):
    """Lines for people, and the document of the same search."""
    asked = ["search", "--model", "60m", "--hardware", "cpu-gloo", *wanted]
    assert main(asked) == 0
    text = capsys.readouterr().out
    assert main([*asked, "--json"]) == 0
    return text.splitlines(), json.loads(capsys.readouterr().out)


def test_search_prints_what_it_says_in_json(capsys):
    lines, document = searched(capsys, "--gpus", "2", "--top", "2")
    assert document["advice"]
    assert set(document["advice"]) <= set(lines)
    by_hand = lines.index("row 1, changed by hand:") + 1
    said = [f"  {margin['says']}" for margin in document["margins"]]
    assert said
    assert lines[by_hand : by_hand + len(said)] == said
    title = lines.index("time against memory: the fastest layout that reserves no more") + 1
    title_of_sizes = lines.index("time against GPUs: the fastest layout of each count")
    said = [int(line.split()[0]) for line in lines[title_of_sizes + 2 :][: len(document["sizes"])]]
    assert said == [size["gpus"] for size in document["sizes"]] == [1, 2, 4, 8]
    assert set(document["gpu_front"]) <= set(said)
    front = document["memory_front"]
    for line, point in zip(lines[title : title + len(front)], front, strict=True):
        reserved, _, step, *_ = line.split()
        assert float(reserved) == pytest.approx(point["reserved_gib"], abs=0.051)
        assert float(step) == pytest.approx(point["step_seconds"], rel=1e-3)
    assert front[0]["layout"] == document["plans"][0]["layout"]
    steps = [point["step_seconds"] for point in front]
    memory = [point["reserved_gib"] for point in front]
    assert steps == sorted(set(steps))
    assert memory == sorted(set(memory), reverse=True)


def test_a_sweeps_front_is_the_counts_that_beat_all_smaller_ones(capsys):
    lines, document = searched(capsys, "--gpus", "1..4")
    seconds = {  # per token: a sweep's batch may follow the count
        plan["hardware"]["gpus"]: 1
        / (plan["time"]["tokens_per_second_per_gpu"] * plan["hardware"]["gpus"])
        for plan in document["plans"]
    }
    assert len(seconds) == 3
    beats = [n for n in sorted(seconds) if all(seconds[n] < seconds[k] for k in seconds if k < n)]
    assert document["gpu_front"] == beats
    slower = {int(line.split()[0]) for line in lines if "no faster than fewer GPUs" in line}
    assert slower == set(seconds) - set(beats)
