"""The step as a whole: identities, limits and directions that must hold."""

from dataclasses import replace

import pytest

from costmodels.hardware import make_cluster
from costmodels.job import Precision, Switches, Target, TrainingJob
from costmodels.layout import Layout, Recompute, Schedule, split_layers
from costmodels.parameters import model_flops_per_token
from costmodels.profiles.reader import read_profile
from costmodels.time import layouts as layout_costs
from costmodels.time.estimate import estimate_time, stage_costs
from costmodels.time.overlap import overlap_of
from planner.presets import read_model

LLAMA = read_model("llama-3.1-8b")
MIXTRAL = read_model("mixtral-8x7b")
H100 = read_profile("h100-sxm-80gb")
JOB = TrainingJob(seq_len=4096, global_batch_size=64)


def layout(model=LLAMA, **settings):
    degrees = ("data_parallel", "tensor_parallel", "pipeline_parallel", "context_parallel")
    stages = settings.get("pipeline_parallel", 1) * settings.get("stages_per_rank", 1)
    shards = settings.get("data_parallel", 1) * settings.get("context_parallel", 1)
    base = {
        "layers_per_stage": split_layers(model.num_layers, stages),
        "zero_group": shards,
        "num_micro_batches": 64
        // settings.get("data_parallel", 1)
        // settings.get("micro_batch_size", 1),
    }
    assert all(settings.get(name, 1) >= 1 for name in degrees)
    return Layout(**(base | settings))


def seconds(model=LLAMA, job=JOB, profile=H100, gpus=8, **settings):
    cluster = make_cluster(profile, gpus)
    return estimate_time(model, job, cluster, layout(model, **settings)).step_seconds


def test_exposed_seconds_of_the_terms_sum_to_the_step():
    cluster = make_cluster(H100, 16)
    time = estimate_time(
        LLAMA,
        JOB,
        cluster,
        layout(tensor_parallel=2, pipeline_parallel=4, data_parallel=2, zero_stage=1),
    )
    assert time.step_seconds == pytest.approx(sum(t.exposed_seconds for t in time.terms))
    assert all(term.exposed_seconds >= 0 for term in time.terms)


def test_tokens_flops_and_mfu_agree():
    time = estimate_time(LLAMA, JOB, make_cluster(H100, 8), layout(data_parallel=8, zero_stage=3))
    assert time.tokens_per_second_per_gpu * time.step_seconds * 8 == pytest.approx(4096 * 64)
    flops = model_flops_per_token(LLAMA, 4096) * time.tokens_per_second_per_gpu
    assert time.flops_per_gpu == pytest.approx(flops)
    assert time.mfu == pytest.approx(flops / 989.4e12)


def test_no_layout_computes_faster_than_the_peak():
    assert seconds(data_parallel=8, zero_stage=3) > (
        model_flops_per_token(LLAMA, 4096) * 4096 * 64 / 8 / 989.4e12
    )


@pytest.mark.parametrize(("num_micro_batches", "bubble"), [(16, 3 / 19), (64, 3 / 67)])
def test_bubble_of_equal_stages_is_the_closed_form(num_micro_batches, bubble):
    # Embedding and head weigh little beside 24 layers of this width.
    model = replace(LLAMA, vocab_size=1024, num_layers=48, hidden_size=8192)
    time = estimate_time(
        model,
        replace(JOB, global_batch_size=num_micro_batches),
        make_cluster(H100, 4),
        layout(model, pipeline_parallel=4, num_micro_batches=num_micro_batches),
    )
    assert time.bubble_fraction == pytest.approx(bubble, rel=0.15)


def test_what_a_slow_network_makes_a_pipeline_wait_is_no_bubble():
    spread = layout(pipeline_parallel=2, num_micro_batches=16)
    job = replace(JOB, global_batch_size=16)
    slow, none = (
        estimate_time(
            LLAMA, job, make_cluster(read_profile("h100-sxm-80gb", [network]), 2, 1), spread
        )
        for network in ("links.inter_node.gb_per_s=0.125", "links.inter_node.gb_per_s=1000000")
    )
    terms = {term.name: term for term in slow.terms}
    bubble = next(term.seconds for term in none.terms if term.name == "bubble")
    assert terms["bubble"].seconds == pytest.approx(bubble, rel=1e-3)
    assert terms["p2p"].exposed_seconds == pytest.approx(
        slow.step_seconds - none.step_seconds, rel=0.02
    )
    assert terms["p2p"].exposed_seconds > 0.2 * slow.step_seconds


def test_interleaving_shrinks_the_bubble():
    plain = seconds(gpus=4, pipeline_parallel=4)
    woven = seconds(gpus=4, pipeline_parallel=4, stages_per_rank=2, schedule=Schedule.INTERLEAVED)
    assert woven < plain


def test_recomputation_costs_less_than_a_whole_forward():
    none = seconds(data_parallel=8, zero_stage=3)
    full = seconds(data_parallel=8, zero_stage=3, recompute=Recompute.FULL)
    some = seconds(data_parallel=8, zero_stage=3, recompute=Recompute.FULL, recompute_layers=8)
    assert none < some < full < 1.36 * none


def test_selective_recomputation_of_flash_attention_costs_a_little():
    none = seconds(data_parallel=8, zero_stage=3)
    selective = seconds(data_parallel=8, zero_stage=3, recompute=Recompute.SELECTIVE)
    assert none < selective < 1.1 * none


def test_fp8_is_faster_but_not_twice():
    wide = seconds(data_parallel=8, zero_stage=3)
    narrow = seconds(job=replace(JOB, precision=Precision.FP8), data_parallel=8, zero_stage=3)
    assert 1.1 < wide / narrow < 1.9


def test_unfused_attention_is_slower_and_more_so_on_long_sequences():
    ratios = []
    for seq_len in (2048, 8192):
        job = replace(JOB, seq_len=seq_len)
        fused = seconds(job=job, data_parallel=8)
        ratios.append(seconds(job=replace(job, flash_attention=False), data_parallel=8) / fused)
    assert 1.0 < ratios[0] < ratios[1]


def test_a_faster_network_never_slows_a_step():
    slow = read_profile("h100-sxm-80gb", ("links.inter_node.gb_per_s=5",))
    settings = {"gpus": 32, "data_parallel": 32, "zero_stage": 3, "num_micro_batches": 2}
    assert seconds(profile=H100, **settings) < seconds(profile=slow, **settings)


def test_scales_per_row_slow_the_products_of_fp8_and_nothing_else():
    rowwise = Switches(rowwise_fp8=True)
    of = {
        (precision, switches): seconds(job=replace(JOB, precision=precision, switches=switches))
        for precision in (Precision.BF16, Precision.FP8)
        for switches in (Switches(), rowwise)
    }
    assert of[Precision.BF16, rowwise] == of[Precision.BF16, Switches()]
    # Products that take two fifths of a step or more run at 0.78 of their rate.
    ratio = of[Precision.FP8, rowwise] / of[Precision.FP8, Switches()]
    assert 1 + 0.4 * 0.22 < ratio < 1 / 0.78
    assert of[Precision.FP8, rowwise] < of[Precision.BF16, rowwise]


def test_a_power_limited_part_is_slower_by_less_than_its_power():
    limited = read_profile("h100-sxm-80gb", ("device.power_watts=500",))
    ratio = seconds(profile=limited, data_parallel=8) / seconds(data_parallel=8)
    assert 1.02 < ratio < 700 / 500


def test_cards_without_peer_access_pay_for_staging():
    card = read_profile("rtx4090-24gb")
    small = replace(LLAMA, num_layers=4)
    settings = {"model": small, "profile": card, "data_parallel": 8, "num_micro_batches": 1}
    job = replace(JOB, global_batch_size=8)
    alone = seconds(small, replace(JOB, global_batch_size=1), card, 1, num_micro_batches=1)
    assert seconds(job=job, **settings) > 1.1 * alone


def test_experts_over_the_network_cost_more_than_within_a_node():
    job = replace(JOB, target=Target.MEGATRON)
    cut = replace(MIXTRAL, moe=replace(MIXTRAL.moe, num_experts=32))

    def dispatch(expert_parallel):
        spread = layout(cut, data_parallel=32, expert_parallel=expert_parallel)
        terms = estimate_time(cut, job, make_cluster(H100, 32), spread).terms
        return sum(term.exposed_seconds for term in terms if term.name == "ep_dispatch")

    # Half of the copies leave the node over ports that are nine times slower than NVLink.
    assert dispatch(32) > 4 * dispatch(8)


def test_a_dispatcher_that_sends_once_per_node_is_faster_across_nodes():
    cut = replace(MIXTRAL, moe=replace(MIXTRAL.moe, num_experts=32, experts_per_token=8))
    job = replace(JOB, target=Target.MEGATRON)
    settings = {"data_parallel": 32, "num_micro_batches": 2, "gpus": 32, "expert_parallel": 32}
    plain = seconds(cut, job, **settings)
    once = seconds(cut, replace(job, switches=Switches(expert_dispatch="deepep")), **settings)
    assert once < plain


def test_layers_that_do_not_divide_pace_the_pipeline():
    even = seconds(gpus=4, pipeline_parallel=4)
    skewed = seconds(gpus=4, pipeline_parallel=4, layers_per_stage=(5, 5, 5, 17))
    assert skewed > 1.5 * even


def test_stage_costs_rebuild_the_work_of_a_rank():
    spread = layout(pipeline_parallel=4, recompute=Recompute.FULL)
    cluster = make_cluster(H100, 4)
    costs = stage_costs(LLAMA, JOB, cluster, spread)
    layer = costs.layer(LLAMA.layer_kind(0))
    time = estimate_time(LLAMA, JOB, cluster, spread)
    middle = 64 * 8 * (layer.forward + layer.backward + layer.recompute)
    busy = (1 - time.bubble_fraction) * time.step_seconds
    assert middle == pytest.approx(busy, rel=0.1)


def test_interval_holds_the_estimate():
    time = estimate_time(LLAMA, JOB, make_cluster(H100, 8), layout(data_parallel=8))
    assert time.interval[0] < time.step_seconds < time.interval[1]


def test_a_precision_that_the_part_lacks_is_refused():
    with pytest.raises(ValueError, match="fp8"):
        seconds(
            profile=read_profile("a100-sxm-80gb"),
            job=replace(JOB, precision=Precision.FP8),
            data_parallel=8,
        )


def terms(target, **settings):
    job = replace(JOB, target=target)
    time = estimate_time(LLAMA, job, make_cluster(H100, 16), layout(**settings))
    return {term.name: term for term in time.terms}


def test_deepspeeds_pipeline_reduces_gradients_after_its_last_backward():
    split = {"pipeline_parallel": 2, "data_parallel": 8, "zero_stage": 1}
    waits, hides = (terms(target, **split) for target in (Target.DEEPSPEED, Target.MEGATRON))
    assert waits["grad_reduce"].exposed_seconds == waits["grad_reduce"].seconds
    assert hides["grad_reduce"].exposed_seconds < 0.5 * hides["grad_reduce"].seconds
    whole = terms(Target.DEEPSPEED, data_parallel=16, zero_stage=1)
    assert whole["grad_reduce"].exposed_seconds < whole["grad_reduce"].seconds


def test_gradients_summed_inside_their_product_hide_behind_it(monkeypatch):
    split = {"tensor_parallel": 8, "data_parallel": 2}
    fused = terms(Target.MEGATRON, **split)["memory_bound"].seconds

    def summed_apart(job):
        return replace(overlap_of(job), accumulation=False)

    monkeypatch.setattr(layout_costs, "overlap_of", summed_apart)
    apart = terms(Target.MEGATRON, **split)["memory_bound"].seconds
    # 8 bytes per weight and micro-batch, of 7.5e9 / 8 weights in products, in 32 micro-batches, at
    # 0.54 of 3.35 TB/s, take 0.134 s; 7 % of it still slow the products down that hide it.
    assert apart - fused == pytest.approx(0.124, rel=0.1)


def test_tensor_parallelism_overlaps_only_where_the_job_says_so():
    split = {"tensor_parallel": 8, "data_parallel": 2, "sequence_parallel": True}
    job = replace(JOB, target=Target.MEGATRON)
    asked = replace(job, switches=Switches(overlap_tensor_parallel=True))
    assert seconds(job=asked, gpus=16, **split) < seconds(job=job, gpus=16, **split)
