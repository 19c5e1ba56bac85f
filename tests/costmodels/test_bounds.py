"""Bounds never exceed the exact estimate, whatever the partition and the recomputed layers."""

import random

import numpy as np
import pytest

from costmodels.bounds.time import time_lower_bound
from costmodels.hardware import make_cluster
from costmodels.job import Target, TrainingJob
from costmodels.layout import ContextParallelType, Layout, Recompute, Schedule
from costmodels.layout_table import table_of
from costmodels.model import LatentAttention, MixtureOfExperts, ModelSpec
from costmodels.profiles.reader import read_profile
from costmodels.schedule import PipelineShape, shape_refusals
from costmodels.time.estimate import estimate_time

DENSE = ModelSpec(
    name="dense",
    architecture="llama",
    hidden_size=2048,
    num_layers=12,
    num_attention_heads=16,
    num_kv_heads=4,
    head_dim=128,
    ffn_hidden_size=5632,
    vocab_size=32001,
    training_seq_len=4096,
)
EXPERTS = ModelSpec(
    name="experts",
    architecture="deepseek_v3",
    hidden_size=1024,
    num_layers=10,
    num_attention_heads=8,
    num_kv_heads=8,
    head_dim=128,
    ffn_hidden_size=4096,
    vocab_size=64000,
    training_seq_len=4096,
    latent_attention=LatentAttention(
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    ),
    moe=MixtureOfExperts(
        num_experts=16,
        experts_per_token=4,
        ffn_hidden_size=512,
        shared_ffn_hidden_size=1024,
        num_dense_layers=1,
    ),
)
WINDOWED = ModelSpec(
    name="windowed",
    architecture="gemma2",
    hidden_size=1536,
    num_layers=11,
    num_attention_heads=8,
    num_kv_heads=4,
    head_dim=256,
    ffn_hidden_size=6144,
    vocab_size=256000,
    training_seq_len=8192,
    norms_per_layer=4,
    window=1024,
    window_period=2,
    tied_embeddings=True,
)


def _partition(rng, layers, stages):
    cuts = sorted(rng.sample(range(1, layers), stages - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))


def _random_layout(rng, model):
    schedule = rng.choice(list(Schedule))
    pp = rng.choice([1, 2, 4]) if schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B) else 2
    vpp = {Schedule.INTERLEAVED: rng.choice([2, 3]), Schedule.ZBV: 2, Schedule.DUALPIPEV: 2}.get(
        schedule, 1
    )
    tp, cp = rng.choice([1, 2, 4]), rng.choice([1, 2])
    dp = 32 // (pp * tp * cp)
    has_experts = model.moe is not None
    recompute = rng.choice(list(Recompute))
    partition = _partition(rng, model.num_layers, pp * vpp)
    zero = rng.choice([0, 1, 2, 3])
    return Layout(
        data_parallel=dp,
        tensor_parallel=tp,
        pipeline_parallel=pp,
        context_parallel=cp,
        expert_parallel=rng.choice([1, 2]) if has_experts and dp * cp * tp % 2 == 0 else 1,
        zero_stage=zero,
        zero_group=dp * cp,
        micro_batch_size=rng.choice([1, 2]),
        num_micro_batches=rng.choice([4, 8, 12]),
        stages_per_rank=vpp,
        schedule=schedule,
        recompute=recompute,
        recompute_layers=rng.choice([0, 1, min(partition)]) if recompute is Recompute.FULL else 0,
        sequence_parallel=tp > 1 and rng.random() < 0.5,
        context_parallel_type=rng.choice(list(ContextParallelType)),
        layers_per_stage=partition,
    )


@pytest.mark.parametrize("seed", range(150))
def test_bound_is_not_above_the_estimate_of_any_partition(seed):
    rng = random.Random(seed)  # noqa: S311  (no secret)
    model = rng.choice([DENSE, EXPERTS, WINDOWED])
    layout = _random_layout(rng, model)
    shape = PipelineShape(
        schedule=layout.schedule,
        pipeline_parallel=layout.pipeline_parallel,
        stages_per_rank=layout.stages_per_rank,
        num_micro_batches=layout.num_micro_batches,
    )
    if shape_refusals(shape):
        return
    target = rng.choice(list(Target))
    cluster = make_cluster(read_profile(rng.choice(["h100-sxm-80gb", "rtx4090-24gb"])), 32)
    job = TrainingJob(seq_len=4096, global_batch_size=layout.global_batch_size, target=target)
    exact = estimate_time(model, job, cluster, layout).step_seconds
    bound = time_lower_bound(model, job, cluster, table_of([layout]))[0]
    assert bound <= exact
    assert bound > 0.2 * exact  # a bound that says nothing would pass the line above


def test_bound_of_one_stage_is_the_estimate():
    cluster = make_cluster(read_profile("h100-sxm-80gb"), 8)
    job = TrainingJob(seq_len=4096, global_batch_size=64)
    layout = Layout(
        data_parallel=8, zero_stage=1, zero_group=8, num_micro_batches=8, layers_per_stage=(12,)
    )
    exact = estimate_time(DENSE, job, cluster, layout).step_seconds
    assert time_lower_bound(DENSE, job, cluster, table_of([layout]))[0] == pytest.approx(exact)


def test_a_row_of_a_table_has_the_bound_of_its_layout_alone():
    rng = random.Random(7)  # noqa: S311  (no secret)
    cluster = make_cluster(read_profile("a100-sxm-80gb"), 32)
    layouts = [_random_layout(rng, EXPERTS) for _ in range(40)]
    job = TrainingJob(seq_len=4096, global_batch_size=64)
    whole = time_lower_bound(EXPERTS, job, cluster, table_of(layouts))
    alone = [time_lower_bound(EXPERTS, job, cluster, table_of([one]))[0] for one in layouts]
    np.testing.assert_allclose(whole, alone, rtol=1e-12)
