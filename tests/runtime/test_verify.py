"""The dry run agrees with the cost model's counts, and sees what does not agree."""

from dataclasses import replace

import lowering_models as small
import pytest
import torch

from costmodels.counts import count_rank
from costmodels.hardware import make_cluster
from costmodels.layout import Layout, Recompute, Schedule
from costmodels.profile_toml import read_profile
from planner.plan import Plan, SolverStatus
from runtime import dry_run as dry
from runtime.lower import lower_graph
from runtime.trackers import Message
from runtime.verify import Pair, bytes_by_axis, disagreements, format_ranks, verify


def layout(**changes):
    return Layout(**{"layers_per_stage": (4,), "num_micro_batches": 4, **changes})


LAYOUTS = {
    "one": layout(),
    "full": layout(recompute=Recompute.FULL, recompute_layers=3),
    "selective": layout(recompute=Recompute.SELECTIVE),
    "tp": layout(tensor_parallel=2),
    "tp-full": layout(tensor_parallel=2, recompute=Recompute.FULL),
    "sp-full": layout(tensor_parallel=2, sequence_parallel=True, recompute=Recompute.FULL),
    "dp": layout(data_parallel=2),
    "zero1": layout(data_parallel=4, zero_stage=1, zero_group=4),
    "zero2-hsdp": layout(data_parallel=4, zero_stage=2, zero_group=2),
    "zero3": layout(data_parallel=4, zero_stage=3, zero_group=4),
    "pp-gpipe": layout(pipeline_parallel=2, layers_per_stage=(1, 3), schedule=Schedule.GPIPE),
    "interleaved": layout(
        pipeline_parallel=2,
        stages_per_rank=2,
        schedule=Schedule.INTERLEAVED,
        layers_per_stage=(1, 1, 1, 1),
    ),
    "all": layout(
        tensor_parallel=2,
        sequence_parallel=True,
        data_parallel=2,
        pipeline_parallel=2,
        zero_stage=1,
        zero_group=2,
        layers_per_stage=(2, 2),
        recompute=Recompute.FULL,
        recompute_layers=1,
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("model", ["qwen3", "gpt2"])
def test_flops_and_bytes_equal_the_counts_exactly(model, name):
    spec, plan_layout, job = small.MODELS[model], LAYOUTS[name], small.job()
    lowered = lower_graph(spec, job, plan_layout)
    for place in range(plan_layout.pipeline_parallel):
        first = place * plan_layout.num_gpus // plan_layout.pipeline_parallel
        run = dry.dry_run(lowered, job, plan_layout, first)
        counts = count_rank(spec, job, plan_layout, place)
        assert run.flops == counts.flops
        found = {axis: count for axis, count in bytes_by_axis(run).items() if count}
        assert found == dict(counts.num_bytes)


def plan_of(plan_layout, model="llama"):
    return Plan(
        model=small.MODELS[model],
        job=small.job(),
        cluster=make_cluster(read_profile("h100-sxm-80gb"), plan_layout.num_gpus),
        layout=plan_layout,
        estimate={},
        solver=SolverStatus(status="given"),
    )


def test_the_report_names_every_role_once():
    report = verify(plan_of(LAYOUTS["all"]))
    answer = report.to_json()
    # The vocabulary is odd: the second tensor rank holds a column less.
    assert [role["ranks"] for role in answer["roles"]] == ["0,2", "1,3", "4,6", "5,7"]
    assert answer["collectives_agree"] is True
    for role in answer["roles"]:
        assert role["flops"]["graph"] == role["flops"]["estimate"] > 0
        assert set(role["bytes"]) == {"dp", "pp", "tp"}
        assert role["live_peak_gib"]["graph"] > 0
    assert not torch.distributed.is_initialized()


def run_of(rank, *messages):
    return dry.RankRun(rank=rank, flops=0, num_bytes={}, peak=0, messages=messages)


def message(operation, num_bytes=8, **changes):
    facts = {"ranks": (0, 1), "num_elements": 2}
    return Message(operation=operation, num_bytes=num_bytes, **{**facts, **changes})


def test_another_order_of_collectives_is_a_disagreement():
    one, two = message("all_reduce"), message("all_gather")
    assert disagreements([run_of(0, one, two), run_of(1, one, two)]) == []
    (words,) = disagreements([run_of(0, one, two), run_of(1, two, one)])
    assert words == "ranks 0 and 1 of group 0-1 differ in collective 0"
    (words,) = disagreements([run_of(0, one, two), run_of(1, one)])
    assert words.endswith("differ in collective 1")


def test_a_message_nobody_receives_is_a_disagreement():
    sent = message("send", peer=1, tag=3)
    received = message("receive", peer=0, tag=3)
    assert disagreements([run_of(0, sent), run_of(1, received)]) == []
    assert disagreements([run_of(0, sent), run_of(1)]) == [
        "rank 0 sends other messages than rank 1 receives"
    ]
    other = replace(received, tag=4)
    assert len(disagreements([run_of(0, sent), run_of(1, other)])) == 1


def test_stages_that_exchange_in_another_order_are_a_disagreement():
    """Each end begins with its send: on NCCL, both would wait."""
    there = {"group": "pp", "tag": 3}
    back = {"group": "pp", "tag": 4}
    sends_first = run_of(0, message("send", peer=1, **there), message("receive", peer=1, **back))
    first = run_of(1, message("receive", peer=0, **there), message("send", peer=0, **back))
    assert disagreements([sends_first, first]) == []
    crossed = run_of(1, message("send", peer=0, **back), message("receive", peer=0, **there))
    assert disagreements([sends_first, crossed]) == [
        "ranks 0 and 1 differ in the order of message 0 of the pair"
    ]


def test_figures_agree_within_a_share_of_the_graphs():
    assert Pair(graph=100, estimate=104).agrees(0.05)
    assert not Pair(graph=100, estimate=106).agrees(0.05)
    assert not Pair(graph=100, estimate=101).agrees()


def test_neighbouring_ranks_are_written_as_runs():
    assert format_ranks((0, 1, 2, 3)) == "0-3"
    assert format_ranks((0, 8, 9, 16)) == "0,8-9,16"
