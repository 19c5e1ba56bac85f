"""ZeRO-3 that keeps what it gathered: the numbers of one process, one gather a step, the peak."""

import pytest
from parity_cases import JOB, MODELS, check, dtype_of, lowered

from costmodels.counts.ranks import count_rank
from costmodels.hardware import make_cluster
from costmodels.job import TrainingJob
from costmodels.layout import Layout, Recompute, Schedule, split_layers
from costmodels.profiles.reader import read_profile
from planner.plan import Plan, SolverStatus
from planner.presets import read_model
from runtime.dry_run.run import dry_run
from runtime.verify import bytes_by_axis, verify


def layout(num_layers=8, batch=32, **fields):
    stages = fields.get("pipeline_parallel", 1) * fields.get("stages_per_rank", 1)
    data = fields.get("data_parallel", 1)
    return Layout(
        **{
            "zero_stage": 3,
            "zero_group": data,
            "keep_gathered": True,
            "micro_batch_size": 4,
            "num_micro_batches": batch // data // 4,
            "layers_per_stage": split_layers(num_layers, stages),
            **fields,
        }
    )


CASES = {
    2: [layout(data_parallel=2), layout(data_parallel=2, recompute=Recompute.FULL)],
    4: [
        layout(data_parallel=4, zero_group=2),
        layout(data_parallel=2, pipeline_parallel=2),
        layout(data_parallel=2, pipeline_parallel=2, schedule=Schedule.ZERO_BUBBLE),
        layout(
            data_parallel=2,
            pipeline_parallel=2,
            stages_per_rank=2,
            schedule=Schedule.INTERLEAVED,
            recompute=Recompute.FULL,
        ),
        layout(data_parallel=2, tensor_parallel=2, sequence_parallel=True),
    ],
}


@pytest.mark.parametrize("num_ranks", CASES)
def test_kept_weights_give_the_numbers_of_one_process(num_ranks):
    check("qwen3-tied", num_ranks, CASES[num_ranks], 600)


def test_experts_that_are_kept_do_too():
    check("mixtral", 4, [layout(data_parallel=4, zero_group=4, expert_parallel=2)], 600)


def test_a_step_gathers_once_whatever_its_micro_batches():
    """The same bytes as ZeRO-2, and fewer than gathering for each pass."""
    assert dtype_of("qwen2-untied").itemsize == 4
    moved = {}
    for name, fields in {
        "kept": {},
        "again": {"keep_gathered": False},
        "stage 2": {"keep_gathered": False, "zero_stage": 2},
    }.items():
        plan = layout(data_parallel=2, **fields)
        run = dry_run(lowered("qwen2-untied", plan), JOB, plan, 0)
        counted = count_rank(MODELS["qwen2-untied"], JOB, plan, 0)
        moved[name] = bytes_by_axis(run)["dp"]
        assert moved[name] == dict(counted.num_bytes)["dp"], name
    assert moved["kept"] == moved["stage 2"] < moved["again"]


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ("llama-3.1-8b", {"data_parallel": 8}),
        ("llama-3.1-8b", {"data_parallel": 4, "pipeline_parallel": 2}),
        ("llama-3.2-1b", {"data_parallel": 4, "recompute": Recompute.FULL}),
    ],
)
def test_verify_closes_where_weights_are_kept(model, fields):
    spec = read_model(model)
    plan = layout(spec.num_layers, batch=16 * fields["data_parallel"], **fields)
    report = verify(
        Plan(
            model=spec,
            job=TrainingJob(seq_len=2048, global_batch_size=plan.global_batch_size),
            cluster=make_cluster(read_profile("h100-sxm-80gb"), plan.num_gpus, plan.num_gpus),
            layout=plan,
            estimate={},
            solver=SolverStatus(status="given"),
        )
    )
    assert report.agrees, report.to_json()
