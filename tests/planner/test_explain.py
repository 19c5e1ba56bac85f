"""Explanations name the numbers that decide, and agree with the estimate."""

from dataclasses import replace
from math import lcm

import pytest

from costmodels.compiled import collectives, compute
from costmodels.job import TrainingJob
from costmodels.layout import (
    ContextParallelType,
    Layout,
    Offload,
    Recompute,
    Schedule,
    split_layers,
)
from costmodels.profiles.reader import make_cluster, read_profile
from costmodels.time.estimate import estimate_time
from costmodels.units import GB
from planner.constraints import FREE, Constraints, applicable
from planner.contract import judgement_json
from planner.explain.formulas import lines_of, worked_formulas
from planner.explain.margins import refitted
from planner.explain.question import answer, asked_layout, why_not
from planner.explain.reasons import bill, differences, limits, side_by_side, why_first
from planner.explain.sensitivity import sensitivities
from planner.explain.what_if import what_if
from planner.judge import Verdict, judge
from planner.plan import Plan, SolverStatus
from planner.presets import read_model
from planner.search.ranking import search


@pytest.fixture(scope="module")
def plan():
    model = read_model("8b")
    cluster = make_cluster(read_profile("h100-sxm-80gb"), 16, None)
    job = TrainingJob(seq_len=4096, global_batch_size=64)
    layout = Layout(
        tensor_parallel=4,
        pipeline_parallel=2,
        data_parallel=2,
        zero_stage=1,
        zero_group=2,
        micro_batch_size=1,
        num_micro_batches=32,
        sequence_parallel=True,
        layers_per_stage=split_layers(model.num_layers, 2),
    )
    judgement = judge(model, job, cluster, layout)
    return Plan(
        model=model,
        job=job,
        cluster=cluster,
        layout=layout,
        estimate=judgement_json(judgement, model, job, cluster),
        solver=SolverStatus(status="given"),
    )


def judge_in(plan, layout):
    return judge(plan.model, plan.job, plan.cluster, layout)


def judged(plan, **changes):
    return judge_in(plan, replace(plan.layout, **changes))


def test_limits_are_shares_of_the_step_and_sum_to_it(plan):
    shares = limits(judged(plan).time, plan.layout)
    assert sum(share for _, share in shares) == pytest.approx(1)
    assert shares[0][0] == "arithmetic"
    assert "tp communication" in dict(shares)


def test_differences_of_terms_sum_to_the_difference_of_steps(plan):
    first, second = judged(plan).time, judged(plan, recompute=Recompute.FULL).time
    total = sum(difference.gain for difference in differences(first, second))
    assert total == pytest.approx(second.step_seconds - first.step_seconds)
    assert differences(first, second)[0].name == "recompute"


def test_why_first_names_what_is_saved_and_how_much(plan):
    words = why_first(judged(plan), judged(plan, recompute=Recompute.FULL))
    assert "% faster" in words
    assert "of recompute" in words


def test_side_by_side_shows_time_and_memory_of_both(plan):
    text = "\n".join(side_by_side(judged(plan), judged(plan, recompute=Recompute.FULL)))
    assert "recompute" in text
    assert "activations" in text
    assert "reserved" in text


def test_a_bill_by_hand(plan):
    time = judged(plan).time
    one_step = bill(time, float(time.tokens), dollars_per_gpu_hour=3.0)
    assert one_step.days == pytest.approx(time.step_seconds / 86400)
    assert one_step.gpu_hours == pytest.approx(16 * time.step_seconds / 3600)
    assert one_step.dollars == pytest.approx(3 * one_step.gpu_hours)


def test_what_zero_3_keeps_does_not_stand_in_the_way_of_another_stage(plan):
    kept = replace(plan, layout=replace(plan.layout, zero_stage=3, keep_gathered=True))
    assert not asked_layout(kept, "zero=2").keep_gathered
    assert asked_layout(kept, "mbs=2").keep_gathered


def test_a_question_changes_what_it_names_and_derives_the_rest(plan):
    asked = asked_layout(plan, "tp=2,mbs=2")
    assert (asked.tensor_parallel, asked.pipeline_parallel) == (2, 2)
    assert asked.data_parallel == 4
    assert asked.num_micro_batches == 8
    assert asked.global_batch_size == plan.job.global_batch_size


def test_a_question_with_virtual_stages_interleaves(plan):
    asked = asked_layout(plan, "vpp=2")
    assert asked.schedule is Schedule.INTERLEAVED
    assert asked.layers_per_stage == (8, 8, 9, 7)  # the head weighs two and a half layers


def test_a_question_without_a_pipeline_drops_the_schedule_that_needs_one(plan):
    layout = replace(plan.layout, schedule=Schedule.ZBV, stages_per_rank=2)
    layout = replace(layout, layers_per_stage=(8, 8, 8, 8))
    asked = asked_layout(replace(plan, layout=layout), "pp=1")
    assert (asked.schedule, asked.stages_per_rank) == (Schedule.ONE_F_ONE_B, 1)
    assert asked.layers_per_stage == (32,)
    assert asked_layout(replace(plan, layout=layout), "pp=1,schedule=zbv").schedule is Schedule.ZBV


def test_a_question_keeps_what_it_does_not_name(plan):
    layout = replace(
        plan.layout, zero_stage=3, zero_group=1, sequence_parallel=False, layers_per_stage=(15, 17)
    )
    asked = asked_layout(replace(plan, layout=layout), "mbs=2")
    assert asked == replace(layout, micro_batch_size=2, num_micro_batches=16)


def test_a_question_may_name_offload_and_the_zero_group(plan):
    asked = asked_layout(plan, "offload=parameters+activations,zero=3,zero-group=1,cp-type=ulysses")
    assert asked.offload == (Offload.OPTIMIZER, Offload.PARAMETERS, Offload.ACTIVATIONS)
    assert (asked.zero_stage, asked.zero_group) == (3, 1)
    assert asked.context_parallel_type is ContextParallelType.ULYSSES
    offloaded = replace(plan, layout=replace(plan.layout, offload=(Offload.OPTIMIZER,)))
    assert asked_layout(offloaded, "offload=none").offload == ()


def test_a_host_that_updates_weights_is_no_memory_bandwidth(plan):
    layout = replace(plan.layout, offload=(Offload.OPTIMIZER,))
    shares = dict(limits(judge_in(plan, layout).time, layout))
    assert shares["the optimizer on the host"] > 0
    assert "the optimizer on the host" not in dict(limits(judged(plan).time, plan.layout))


def test_a_question_recomputes_the_fewest_layers_that_fit(plan):
    few = replace(
        plan,
        layout=replace(
            plan.layout,
            tensor_parallel=1,
            pipeline_parallel=1,
            data_parallel=16,
            zero_stage=3,
            zero_group=16,
            num_micro_batches=4,
            sequence_parallel=False,
            recompute=Recompute.FULL,
            recompute_layers=31,
            layers_per_stage=(32,),
        ),
    )
    asked = asked_layout(few, "pp=2,tp=2")  # 16 layers a stage: 31 of them would be illegal
    assert asked.layers_per_stage == (16, 16)
    assert 1 <= asked.recompute_layers < 16
    assert judged(few).verdict is Verdict.FITS
    assert why_not(few, "pp=2,tp=2")[1].verdict is Verdict.FITS
    assert asked_layout(few, "recompute=none").recompute_layers == 0
    assert asked_layout(few, "recompute=full,recompute_layers=5").recompute_layers == 5


def test_where_another_layout_is_ahead_already_nothing_parts_them(plan):
    changed = what_if(plan, "global_batch_size=16")
    theirs = refitted(changed.best.layout, plan.job, plan.cluster)
    assert theirs != plan.layout
    assert judge_in(plan, theirs).time.step_seconds < changed.before.time.step_seconds
    assert changed.threshold is None


@pytest.fixture(scope="module")
def best_plan(plan):
    constraints = applicable(FREE, plan.job.target, plan.model)
    found = search(plan.model, plan.job, plan.cluster, constraints, top=1)
    return replace(plan, layout=found.plans[0].layout)


def order_of(plan, theirs, **inputs):
    """Whether another layout runs faster than the plan's, or alone, under other inputs."""
    there = replace(plan, **inputs)
    ours, theirs = (
        judge_in(there, refitted(one, there.job, there.cluster)) for one in (plan.layout, theirs)
    )
    return theirs.runs and (not ours.runs or theirs.time.step_seconds < ours.time.step_seconds)


def test_from_a_threshold_of_the_batch_on_the_order_is_another(best_plan):
    changed = what_if(best_plan, "global_batch_size=16")
    theirs, batch = changed.best.layout, int(changed.threshold)
    assert 16 <= batch < 64
    step = lcm(*(one.data_parallel * one.micro_batch_size for one in (best_plan.layout, theirs)))
    before = (batch // step + 1) * step  # the next larger batch that both can do
    assert before < 64
    behind, ahead = (replace(best_plan.job, global_batch_size=size) for size in (before, batch))
    assert not order_of(best_plan, theirs, job=behind)
    assert order_of(best_plan, theirs, job=ahead)


def test_from_a_threshold_of_a_link_on_the_order_is_another(best_plan):
    changed = what_if(best_plan, "links.inter_node.gb_per_s=1")
    assert 1 < changed.threshold < changed.old
    link = best_plan.cluster.profile.inter_node
    behind, ahead = (
        replace(
            best_plan.cluster,
            profile=replace(
                best_plan.cluster.profile,
                inter_node=replace(link, bandwidth=share * changed.threshold * GB),
            ),
        )
        for share in (1.0001, 0.9999)
    )
    assert not order_of(best_plan, changed.best.layout, cluster=behind)
    assert order_of(best_plan, changed.best.layout, cluster=ahead)


def test_an_illegal_question_is_answered_with_the_rule(plan):
    ours, theirs = why_not(plan, "tp=16")
    assert theirs.verdict is Verdict.ILLEGAL
    assert answer(ours, theirs).startswith(f"illegal, {theirs.violations[0].rule}")


def test_a_layout_too_large_for_memory_is_answered_with_the_numbers(plan):
    words = answer(*why_not(plan, "tp=1,pp=1,zero=0,mbs=4"))
    assert words.startswith("does not fit")
    assert "GiB" in words


def test_a_slower_layout_is_answered_with_how_much(plan):
    assert "% slower than the plan" in answer(*why_not(plan, "recompute=full"))


@pytest.mark.parametrize(
    "question", ["tp", "tp=x", "tp=0", "speed=9", "schedule=fast", "", "tp=2,tp=4", "offload=disk"]
)
def test_questions_that_say_nothing_are_refused(plan, question):
    with pytest.raises(ValueError, match="--why-not"):
        asked_layout(plan, question)


def test_a_better_machine_is_never_slower_and_arithmetic_matters_most(plan):
    found = sensitivities(plan)
    assert all(one.gain >= -1e-9 for one in found)
    assert found[0].key == "device.peak_tflops"
    assert found[0].gain < 0.1 + 1e-3


def test_sensitivity_is_the_estimates_own_change(plan):
    profile = plan.cluster.profile
    gain = {one.key: one.gain for one in sensitivities(plan)}["links.intra_node.gb_per_s"]

    def seconds(factor):
        link = replace(profile.intra_node, bandwidth=profile.intra_node.bandwidth * factor)
        cluster = replace(plan.cluster, profile=replace(profile, intra_node=link))
        return estimate_time(plan.model, plan.job, cluster, plan.layout).step_seconds

    assert gain == pytest.approx(seconds(0.95) / seconds(1.05) - 1)


def test_formulas_with_numbers_give_what_the_compiled_model_computes(plan):
    priced = {"forward of the product": compute.gemm, "forward of attention": compute.attention}
    for worked in worked_formulas(plan):
        numbers = {name: value for name, value, _, _ in worked.numbers}
        function = next(
            (f for title, f in priced.items() if worked.title.startswith(title)),
            collectives.all_gather,
        )
        assert float(function(**numbers).seconds) == pytest.approx(worked.seconds), worked.title


def test_formulas_cover_products_attention_and_the_tensor_axis(plan):
    titles = [worked.title for worked in worked_formulas(plan)]
    assert titles[0].startswith("forward of the product ffn")
    assert "forward of attention" in titles
    assert any("tp axis" in title for title in titles)


def test_a_derivative_by_hand(plan):
    attention = next(w for w in worked_formulas(plan) if w.title == "forward of attention")
    shares = dict(attention.derivatives)
    numbers = {name: value for name, value, _, _ in attention.numbers}
    arithmetic = 1 - numbers["kernels"] * numbers["kernel_gap"] / attention.seconds
    assert shares["peak"] == pytest.approx(-arithmetic)
    assert shares["attention_flops"] == pytest.approx(arithmetic)
    assert any("bytes" in line or "FLOP" in line for line in lines_of(attention))


def test_what_if_keeps_a_plan_that_stays_legal_and_changes_the_figure(plan):
    changed = what_if(plan, "links.inter_node.gb_per_s=100")
    assert changed.old == pytest.approx(50)
    assert changed.new == 100
    assert changed.after.time.step_seconds <= changed.before.time.step_seconds
    assert changed.best.time.step_seconds <= changed.after.time.step_seconds + 1e-9


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ("links.inter_node.gb_per_s", "KEY=VALUE"),
        ("links.inter.gb_per_s=3", "links.inter"),
        ("device.memory_gib=-1", "memory_gib"),
        ("seq_len=many", "seq_len"),
        ("gpus=12", "12"),
    ],
)
def test_changes_that_make_no_sense_are_refused(plan, change, word):
    with pytest.raises(ValueError, match=word):
        what_if(plan, change)


@pytest.mark.parametrize(
    ("question", "stages", "schedule"),
    [("pp=4", 1, Schedule.ONE_F_ONE_B), ("pp=4,vpp=2", 2, Schedule.INTERLEAVED)],
)
def test_another_number_of_stages_is_split_as_the_search_splits_it(
    plan, question, stages, schedule
):
    _, asked = why_not(plan, question)
    fixed = Constraints(
        tensor_parallel=(4,),
        pipeline_parallel=(4,),
        context_parallel=(1,),
        micro_batch_size=(1,),
        stages_per_rank=(stages,),
        schedule=(schedule,),
        zero_stage=(1,),
        recompute=(Recompute.NONE,),
        sequence_parallel=(True,),
        offload=((),),
        rank_order=(asked.layout.rank_order,),
    )
    found = search(plan.model, plan.job, plan.cluster, fixed, top=1).plans[0]
    assert asked.layout.layers_per_stage == found.layout.layers_per_stage
    assert asked.layout.layers_per_stage != split_layers(plan.model.num_layers, 4 * stages)
