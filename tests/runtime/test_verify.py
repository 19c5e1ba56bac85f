"""The dry run agrees with the cost model's counts, and sees what does not agree."""

from dataclasses import replace

import lowering_models as small
import pytest
import torch

from costmodels.counts.ranks import count_rank
from costmodels.hardware import make_cluster
from costmodels.layout import Layout, Recompute, Schedule
from costmodels.profiles.reader import read_profile
from costmodels.schedule import PipelineShape, shape_refusals, table_from_strings
from planner.plan import Plan, SolverStatus
from runtime.dry_run import run as dry
from runtime.dry_run.trackers import Message
from runtime.lower import rows_of
from runtime.verify import (
    Pair,
    bytes_by_axis,
    crossed_messages,
    disagreements,
    format_ranks,
    verify,
)


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
    # Groups that divide few sizes: their buckets are padded.
    "zero1-of-7": layout(data_parallel=7, zero_stage=1, zero_group=7),
    "zero2-of-5-tp": layout(data_parallel=5, zero_stage=2, zero_group=5, tensor_parallel=2),
    "zero3-of-3": layout(data_parallel=3, zero_stage=3, zero_group=3),
    "zero3-of-7-sp": layout(
        data_parallel=7, zero_stage=3, zero_group=7, tensor_parallel=2, sequence_parallel=True
    ),
    "zero2-hsdp-of-5": layout(data_parallel=10, zero_stage=2, zero_group=5),
    "zero1-of-5-pp": layout(
        data_parallel=5, zero_stage=1, zero_group=5, pipeline_parallel=2, layers_per_stage=(2, 2)
    ),
    "pp-gpipe": layout(pipeline_parallel=2, layers_per_stage=(1, 3), schedule=Schedule.GPIPE),
    "interleaved": layout(
        pipeline_parallel=2,
        stages_per_rank=2,
        schedule=Schedule.INTERLEAVED,
        layers_per_stage=(1, 1, 1, 1),
    ),
    # Recomputation ends before the last product of a layer, also where weights' gradients wait.
    "zero-bubble-full": layout(
        pipeline_parallel=2,
        schedule=Schedule.ZERO_BUBBLE,
        layers_per_stage=(1, 3),
        recompute=Recompute.FULL,
        recompute_layers=2,
    ),
    **{
        f"{schedule}-full": layout(
            pipeline_parallel=2,
            stages_per_rank=2,
            schedule=schedule,
            layers_per_stage=(1, 1, 1, 1),
            recompute=Recompute.FULL,
            num_micro_batches=8,
        )
        for schedule in (Schedule.ZBV, Schedule.DUALPIPEV)
    },
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
    lowered = small.lowered(spec, job, plan_layout)
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


def test_a_correct_plan_of_a_long_pipeline_agrees():
    """Ranks are run with other micro-batches than their neighbours, or not at all."""
    plan_layout = layout(
        pipeline_parallel=4,
        schedule=Schedule.ZERO_BUBBLE,
        num_micro_batches=12,
        layers_per_stage=(1,) * 4,
    )
    assert verify(plan_of(plan_layout)).disagreements == ()


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


def rows(schedule, ranks, stages_per_rank, num_micro_batches):
    """Return the rows of a pipeline, of more micro-batches where the schedule needs more."""
    sizes = {"pipeline_parallel": ranks, "stages_per_rank": stages_per_rank}
    count = num_micro_batches
    while shape_refusals(PipelineShape(schedule=schedule, num_micro_batches=count, **sizes)):
        count += 1
    stages = (1,) * ranks * stages_per_rank
    return rows_of(
        layout(schedule=schedule, num_micro_batches=count, layers_per_stage=stages, **sizes)
    )


SCHEDULES = [
    (Schedule.GPIPE, 1),
    (Schedule.ONE_F_ONE_B, 1),
    (Schedule.ZERO_BUBBLE, 1),
    (Schedule.ZERO_BUBBLE, 2),
    (Schedule.INTERLEAVED, 2),
    (Schedule.INTERLEAVED, 3),
    (Schedule.ZBV, 2),
    (Schedule.DUALPIPEV, 2),
]


@pytest.mark.parametrize("ranks", [4, 7])
@pytest.mark.parametrize(("schedule", "stages_per_rank"), SCHEDULES)
def test_all_schedules_exchange_in_the_same_order_at_both_ends(schedule, stages_per_rank, ranks):
    table = rows(schedule, ranks, stages_per_rank, 11)
    assert any(not action.is_compute for action in table.actions(0))
    assert list(crossed_messages(table)) == []


def test_stages_that_exchange_in_another_order_are_a_disagreement():
    """Rank 1 sends before it has received: on NCCL, both would wait."""
    table = rows(Schedule.ONE_F_ONE_B, 4, 1, 8)
    swapped = {"1SEND_B0": "1RECV_F4", "1RECV_F4": "1SEND_B0"}
    crossed = [[swapped.get(text, text) for text in row] for row in table.strings()]
    assert list(crossed_messages(table_from_strings(table.shape, crossed))) == [
        "pipeline ranks 0 and 1 differ in message 4 of the pair"
    ]


def test_a_message_of_one_end_only_is_a_disagreement_of_the_pair():
    table = rows(Schedule.GPIPE, 2, 1, 3)
    first, last = table.strings()
    cut = table_from_strings(table.shape, [first, [text for text in last if text != "1RECV_F2"]])
    (words,) = crossed_messages(cut)
    assert words.startswith("pipeline ranks 0 and 1 differ in message ")


def test_figures_agree_within_a_share_of_the_graphs():
    assert Pair(graph=100, estimate=104).agrees(0.05)
    assert not Pair(graph=100, estimate=106).agrees(0.05)
    assert not Pair(graph=100, estimate=101).agrees()


def test_neighbouring_ranks_are_written_as_runs():
    assert format_ranks((0, 1, 2, 3)) == "0-3"
    assert format_ranks((0, 8, 9, 16)) == "0,8-9,16"
