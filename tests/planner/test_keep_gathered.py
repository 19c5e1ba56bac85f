"""When ZeRO-3 may keep what it gathers, and when the search lets it."""

from dataclasses import replace

import pytest

from costmodels.job import Target, TrainingJob
from costmodels.layout import Layout, Offload
from costmodels.memory.estimate import estimate_memory
from costmodels.profiles.reader import make_cluster, read_profile
from costmodels.time.estimate import estimate_time
from planner.constraints import Constraints
from planner.presets import read_model
from planner.rules import violations
from planner.search.axes import axes_of
from planner.search.ranking import search

MODEL = read_model("8b")
CLUSTER = make_cluster(read_profile("h100-sxm-80gb"), 8, 8)
JOB = TrainingJob(seq_len=4096, global_batch_size=64)
KEPT = Layout(
    data_parallel=8,
    zero_stage=3,
    zero_group=8,
    keep_gathered=True,
    num_micro_batches=8,
    layers_per_stage=(32,),
)


def seconds(layout):
    return estimate_time(MODEL, JOB, CLUSTER, layout).step_seconds


def held(layout):
    return estimate_memory(MODEL, JOB, CLUSTER, layout).parts.reserved


def test_keeping_is_faster_than_gathering_again_and_takes_more():
    again = replace(KEPT, keep_gathered=False)
    assert seconds(KEPT) < seconds(again)
    weights = 2 * 8.03e9
    assert held(KEPT) - held(again) == pytest.approx(weights, rel=0.15)


def test_what_is_kept_hides_behind_the_first_forward_alone():
    cluster = make_cluster(read_profile("h100-sxm-80gb"), 64, 8)

    def exposed(micro_batches):
        layout = replace(KEPT, data_parallel=64, zero_group=64, num_micro_batches=micro_batches)
        job = TrainingJob(seq_len=512, global_batch_size=layout.global_batch_size)
        terms = {term.name: term for term in estimate_time(MODEL, job, cluster, layout).terms}
        return terms["zero3_gather"].exposed_seconds

    # Each micro-batch adds its reduction and no relief for the one gather, which takes longer than
    # a forward of 512 tokens.
    once, twice, often = (exposed(count) for count in (1, 2, 8))
    assert often - twice == pytest.approx(6 * (twice - once), rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"zero_stage": 2}, {"zero_stage": (3,), "offload": ()}),
        (
            {"offload": (Offload.OPTIMIZER, Offload.PARAMETERS)},
            {
                "zero_stage": (),
                "offload": ("none", "optimizer", "activations", "optimizer,activations"),
            },
        ),
    ],
)
def test_what_is_not_gathered_from_others_cannot_be_kept(changes, remedy):
    (broken,) = violations(MODEL, JOB, CLUSTER, replace(KEPT, **changes))
    assert broken.rule == "kept_weights_come_from_other_ranks"
    assert broken.allowed == {"keep_gathered": (False,), **remedy}


@pytest.mark.parametrize("target", [target for target in Target if target is not Target.NATIVE])
def test_other_targets_are_not_told_what_to_keep(target):
    broken = violations(MODEL, replace(JOB, target=target), CLUSTER, KEPT)
    assert "target_is_told_what_to_keep" in {violation.rule for violation in broken}


@pytest.mark.parametrize(
    ("constraints", "choices"),
    [
        (Constraints(), [(0, 0), (1, 0), (2, 0), (3, 0), (3, 1)]),
        (Constraints(zero_stage=(3,)), [(3, 0), (3, 1)]),
        (Constraints(zero_stage=(2, 3)), [(2, 0), (3, 0), (3, 1)]),
        (Constraints(keep_gathered=(True,)), [(3, 1)]),
        (Constraints(zero_stage=(1,), keep_gathered=(True,)), [(1, 1)]),
        (Constraints(zero_stage=(3,), keep_gathered=(False,)), [(3, 0)]),
    ],
)
def test_the_search_tries_keeping_wherever_stage_3_may_be(constraints, choices):
    axis = axes_of(MODEL, JOB, CLUSTER, constraints).named("zero_stage")
    assert [tuple(row) for row in axis.values.tolist()] == choices


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_stage_by_itself_beats_the_search_over_all(stage):
    """Over many nodes and short sequences what stages 2 and 3 move is most of the step."""
    cluster = make_cluster(read_profile("h100-sxm-80gb"), 256, 8)
    job = TrainingJob(seq_len=1024, global_batch_size=512)
    asked = Constraints(tensor_parallel=(1,), pipeline_parallel=(1,), context_parallel=(1,))
    free = search(MODEL, job, cluster, asked, top=1)
    alone = search(MODEL, job, cluster, replace(asked, zero_stage=(stage,)), top=1)
    assert free.status == "optimal"
    best = free.plans[0].time.step_seconds
    assert all(plan.time.step_seconds >= best * (1 - 1e-9) for plan in alone.plans)


def test_states_that_exclude_each_other_leave_nothing_that_fits():
    asked = Constraints(zero_stage=(1,), offload=((Offload.OPTIMIZER, Offload.PARAMETERS),))
    assert search(MODEL, JOB, CLUSTER, asked).status == "infeasible"


def test_the_search_trades_memory_for_time():
    """With room it keeps; on cards that weights and states fill it gathers again."""
    asked = Constraints(zero_stage=(3,), tensor_parallel=(1,), pipeline_parallel=(1,))
    roomy = search(MODEL, JOB, CLUSTER, asked, top=1)
    profile = read_profile("h100-sxm-80gb", ("device.memory_gib=28",))
    tight = search(MODEL, JOB, make_cluster(profile, 8, 8), asked, top=1)
    assert roomy.plans[0].layout.keep_gathered
    assert not tight.plans[0].layout.keep_gathered
    assert roomy.status == tight.status == "optimal"
