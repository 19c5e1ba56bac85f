"""What the Ultra-Scale Playbook found must come out of the estimates.

Source of every figure: Hugging Face, "The Ultra-Scale Playbook: Training LLMs on GPU Clusters"
(2025), and nanotron's scripts/scaling_benchmarks.py for the shapes. Each test states its model,
hardware, length, batch and tolerance; H100 nodes of 8 have 400 Gb/s per GPU between them.
"""

from dataclasses import replace
from itertools import product

import pytest

from costmodels.hardware import Cluster
from costmodels.job import Target, TrainingJob
from costmodels.layout import Layout, Recompute, Schedule, split_layers
from costmodels.memory.estimate import blocks_of_layout
from costmodels.memory.stages import stage_memory
from costmodels.model import ModelSpec
from costmodels.parameters import num_parameters
from costmodels.profiles.reader import make_cluster, read_profile
from costmodels.schedule import StageDurations
from costmodels.schedule.steady import simulate_schedule
from costmodels.units import GIB
from planner.constraints import Constraints
from planner.judge import Judgement, Verdict, judge
from planner.presets import read_model
from planner.search.ranking import search

H100 = read_profile("h100-sxm-80gb")  # links.inter_node: 50 GB/s = 400 Gb/s per GPU
A100 = read_profile("a100-sxm-80gb")


def nodes(gpus: int, profile=H100) -> Cluster:
    return make_cluster(profile, gpus, 8)


def nanotron_model(**changed) -> ModelSpec:
    """The 3.57 B model of the Playbook's scaling runs."""
    known = {
        "name": "nanotron-3.57B",
        "architecture": "llama",
        "hidden_size": 3072,
        "num_layers": 28,
        "num_attention_heads": 32,
        "num_kv_heads": 32,
        "head_dim": 96,
        "ffn_hidden_size": 8192,
        "vocab_size": 131072,
        "training_seq_len": 4096,
        "tied_embeddings": True,
    }
    return ModelSpec(**(known | changed))


def spread(model: ModelSpec, job: TrainingJob, gpus: int, **axes) -> Layout:
    """A layout with what is left out derived: data parallel, micro-batches, an even split."""
    axes = {"tensor_parallel": 1, "pipeline_parallel": 1, "micro_batch_size": 1} | axes
    data = gpus // (axes["tensor_parallel"] * axes["pipeline_parallel"])
    derived = {
        "data_parallel": data,
        "zero_group": data,
        "num_micro_batches": job.global_batch_size // (data * axes["micro_batch_size"]),
        "sequence_parallel": axes["tensor_parallel"] > 1,
        "layers_per_stage": split_layers(model.num_layers, axes["pipeline_parallel"]),
    }
    return Layout(**(derived | axes))


def judged(model, job, gpus, *, profile=H100, **axes) -> Judgement:
    return judge(model, job, nodes(gpus, profile), spread(model, job, gpus, **axes))


def rate(said: Judgement) -> float:
    assert said.time is not None, said.violations
    return said.time.tokens_per_second_per_gpu


def test_tensor_parallelism_over_two_nodes_costs_a_3b_model_43_percent():
    """nanotron's 3.57 B, 4,096 tokens, batches 18 and 40 as measured; within 10 points."""
    model, rates = nanotron_model(), []
    for degree, batch in ((8, 18), (16, 40)):
        job = TrainingJob(seq_len=4096, global_batch_size=batch, target=Target.NANOTRON)
        said = judged(model, job, degree, tensor_parallel=degree, micro_batch_size=batch)
        rates.append(rate(said))
    assert 1 - rates[1] / rates[0] == pytest.approx(0.434, abs=0.10)


@pytest.mark.parametrize("target", [Target.NANOTRON, Target.NATIVE])
def test_a_pipeline_over_two_nodes_costs_14_percent(target):
    """A 3 B model whose 30 layers and head balance 16 stages (vocabulary 32,768), 4,096 tokens, 32
    micro-batches of 2; within 6 points. Without imbalance and transfers it would be 17 %.
    """
    model, rates = nanotron_model(num_layers=30, vocab_size=32768), []
    for split in ((3, *(4,) * 6, 3), (1, *(2,) * 14, 1)):
        stages = len(split)
        job = TrainingJob(seq_len=4096, global_batch_size=64, target=target)
        said = judged(
            model,
            job,
            stages,
            pipeline_parallel=stages,
            micro_batch_size=2,
            layers_per_stage=split,
        )
        rates.append(rate(said))
    assert 1 - rates[1] / rates[0] == pytest.approx(0.14, abs=0.06)


@pytest.mark.parametrize(
    ("schedule", "v", "p", "m"),
    [
        *product([Schedule.GPIPE, Schedule.ONE_F_ONE_B], [1], [2, 4, 8], [8, 32]),
        *product([Schedule.INTERLEAVED], [2, 4], [2, 4, 8], [8, 32]),
    ],
)
def test_idle_over_ideal_time_is_ranks_less_one_over_micro_batches(schedule, v, p, m):
    """Equal stages, backward twice as long as forward, no transfers; exact."""
    stages = p * v
    durations = StageDurations(
        forward=(1.0,) * stages, backward_input=(1.0,) * stages, backward_weight=(1.0,) * stages
    )
    ideal = 3.0 * v * m
    makespan = simulate_schedule(schedule, p, v, m, durations).makespan
    assert makespan / ideal - 1 == pytest.approx((p - 1) / (v * m))


def test_70b_in_16_bit_is_130_gib():
    """Llama-3.1-70B; within 2 %."""
    assert 2 * num_parameters(read_model("70b")) / GIB == pytest.approx(130, rel=0.02)


def test_full_recomputation_adds_30_to_40_percent():
    """Llama-3.1-70B, 64 H100, TP8, ZeRO-1, 4,096 tokens, 512 sequences, Megatron (which computes
    the whole forward again; our runtime stops when backward has what it needs).
    """
    model = read_model("70b")
    job = TrainingJob(seq_len=4096, global_batch_size=512, target=Target.MEGATRON)
    seconds = {
        recompute: judged(
            model, job, 64, tensor_parallel=8, zero_stage=1, recompute=recompute
        ).time.step_seconds
        for recompute in (Recompute.NONE, Recompute.FULL)
    }
    assert 1.30 <= seconds[Recompute.FULL] / seconds[Recompute.NONE] <= 1.40


def test_selective_recomputation_saves_70_percent_of_activations_for_3_percent_of_time():
    """GPT-3 175B, 64 A100, TP8 PP8, 2,048 tokens, 64 sequences, unfused attention, Megatron
    (arXiv:2205.05198): 65 to 75 % of a layer's activations for 2 to 4 % of the step.
    """
    model = read_model("175b")
    job = TrainingJob(
        seq_len=2048, global_batch_size=64, target=Target.MEGATRON, flash_attention=False
    )
    kept, seconds = {}, {}
    for recompute in (Recompute.NONE, Recompute.SELECTIVE):
        layout = spread(model, job, 64, tensor_parallel=8, pipeline_parallel=8, recompute=recompute)
        place = model, job, nodes(64, A100), layout
        ((_, layer),) = stage_memory(*place, blocks_of_layout(*place)).layers
        kept[recompute] = layer.kept
        seconds[recompute] = judge(model, job, nodes(64, A100), layout).time.step_seconds
    assert 0.65 <= 1 - kept[Recompute.SELECTIVE] / kept[Recompute.NONE] <= 0.75
    assert 1.02 <= seconds[Recompute.SELECTIVE] / seconds[Recompute.NONE] <= 1.04


PURE = [(Target.NATIVE, 0), (Target.NATIVE, 1), (Target.NATIVE, 3), (Target.MEGATRON, 1)]


@pytest.mark.parametrize(("target", "zero"), PURE)
def test_pure_data_parallelism_pays_more_the_more_gpus_it_spans(target, zero):
    """Llama-3.1-8B, 4,096 tokens, one sequence per GPU, full recomputation."""
    model, rates = read_model("8b"), []
    for gpus in (128, 1024, 4096):
        job = TrainingJob(seq_len=4096, global_batch_size=gpus, target=target)
        said = judged(model, job, gpus, zero_stage=zero, recompute=Recompute.FULL)
        rates.append(rate(said))
    assert rates[0] > rates[1] > rates[2]


def model_200b() -> ModelSpec:
    return ModelSpec(
        name="200B",
        architecture="llama",
        hidden_size=12288,
        num_layers=128,
        num_attention_heads=96,
        num_kv_heads=8,
        head_dim=128,
        ffn_hidden_size=32768,
        vocab_size=128256,
        training_seq_len=8192,
    )


def test_the_200b_example_fits_with_zero_2_and_full_recomputation():
    """200 B, 64 H100, TP8 PP4 DP2, 8,192 tokens, 128 sequences, fp32 gradients."""
    model = model_200b()
    assert num_parameters(model) / 32 == pytest.approx(6.25e9, rel=0.01)
    job = TrainingJob(seq_len=8192, global_batch_size=128, grad_dtype="fp32")
    fits = {
        (zero, recompute)
        for zero, recompute in product(range(4), Recompute)
        if judged(
            model,
            job,
            64,
            tensor_parallel=8,
            pipeline_parallel=4,
            zero_stage=zero,
            recompute=recompute,
        ).verdict
        is Verdict.FITS
    }
    assert fits == {(2, Recompute.FULL), (3, Recompute.FULL)}


@pytest.mark.matrix
def test_the_search_is_at_least_as_fast_as_the_200b_example():
    """The layout above, and the whole space of the same job."""
    model = model_200b()
    job = TrainingJob(seq_len=8192, global_batch_size=128, grad_dtype="fp32")
    example = judged(
        model,
        job,
        64,
        tensor_parallel=8,
        pipeline_parallel=4,
        zero_stage=2,
        recompute=Recompute.FULL,
    )
    found = search(model, job, nodes(64), Constraints(runnable=True), top=1)
    assert rate(found.plans[0]) >= rate(example)


SMALL = [("8b", 16), ("13b", 32), ("70b", 64)]


def faster_with_zero_3(micro_batches) -> list[tuple]:
    """Pairs of layouts that both fit, of which the one with ZeRO-3 is faster; 4,096 tokens."""
    found = []
    for (name, gpus), tp, pp, mbs, m, recompute in product(
        SMALL, (1, 4, 8), (2, 4, 8), (1, 2), micro_batches, (Recompute.NONE, Recompute.FULL)
    ):
        data = gpus // (tp * pp)
        if data < 2:
            continue
        model = read_model(name)
        job = TrainingJob(seq_len=4096, global_batch_size=data * mbs * m)
        axes = {"tensor_parallel": tp, "pipeline_parallel": pp, "micro_batch_size": mbs}
        whole, cut = (
            judged(model, job, gpus, zero_stage=zero, recompute=recompute, **axes)
            for zero in (1, 3)
        )
        both = whole.verdict is Verdict.FITS and cut.verdict is Verdict.FITS
        if both and cut.time.step_seconds < whole.time.step_seconds:
            found.append((name, tp, pp, mbs, m, recompute))
    return found


@pytest.mark.parametrize("micro_batches", [(1, 2), (4, 8)])
def test_in_a_pipeline_zero_3_is_not_faster_than_zero_1(micro_batches):
    """8b on 16, 13b on 32 and 70b on 64 H100; every pair that fits."""
    assert faster_with_zero_3(micro_batches) == []


def test_routing_to_4_nodes_makes_experts_over_8_nodes_faster():
    """DeepSeek-V3, 64 H100, EP64, 4,096 tokens, 1,024 sequences. A token goes once to each node
    that it visits (DeepEP); an all-to-all sends every copy by itself and gains nothing.
    """
    limited = read_model("deepseek-v3")
    assert (limited.moe.num_groups, limited.moe.groups_per_token) == (8, 4)
    free = replace(limited, moe=replace(limited.moe, num_groups=1, groups_per_token=1))
    seconds = {}
    for dispatch in ("deepep", "alltoall"):
        job = TrainingJob(seq_len=4096, global_batch_size=1024, target=Target.MEGATRON)
        job = replace(job, switches=replace(job.switches, expert_dispatch=dispatch))
        seconds[dispatch] = [
            judged(model, job, 64, expert_parallel=64, zero_stage=1).time.step_seconds
            for model in (limited, free)
        ]
    assert seconds["deepep"][0] < 0.99 * seconds["deepep"][1]
    assert seconds["alltoall"][0] == pytest.approx(seconds["alltoall"][1])
