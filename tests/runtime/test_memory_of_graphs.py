"""Estimated peaks of the native runtime against the dry run's, which share no formula."""

from dataclasses import replace

import lowering_models as small
import pytest

from costmodels.hardware import make_cluster
from costmodels.job import Optimizer, Switches, TrainingJob
from costmodels.layout import Layout, Offload, Recompute, Schedule
from costmodels.memory.estimate import estimate_memory
from costmodels.profiles.reader import read_profile
from planner.presets import read_model
from runtime.dry_run.run import dry_run

LLAMA = replace(read_model("llama-3.1-8b"), num_layers=4)
SMALL = replace(read_model("llama-3.2-1b"), num_layers=4)  # tied embeddings
TINY = read_model("20m")  # many layers would share one bucket
_MIXTRAL = read_model("mixtral-8x7b")
EXPERTS = replace(
    _MIXTRAL,
    num_layers=4,
    hidden_size=1024,
    num_attention_heads=16,
    num_kv_heads=4,
    head_dim=64,
    ffn_hidden_size=3584,
    moe=replace(_MIXTRAL.moe, ffn_hidden_size=3584),
)
LATENT = replace(read_model("deepseek-v2-lite"), num_layers=2)  # the second with experts

ONE_STAGE = {"layers_per_stage": (4,)}
SHARDED = {**ONE_STAGE, "data_parallel": 4, "zero_group": 4}
CASES = {
    "plain": (SMALL, ONE_STAGE, {}),
    "accumulation": (SMALL, {**ONE_STAGE, "num_micro_batches": 3}, {}),
    "full recomputation": (LLAMA, {**ONE_STAGE, "recompute": Recompute.FULL}, {}),
    "sequence parallel": (
        SMALL,
        {**ONE_STAGE, "tensor_parallel": 4, "sequence_parallel": True},
        {},
    ),
    "optimizer states cut": (LLAMA, {**SHARDED, "zero_stage": 1}, {"grad_dtype": "bf16"}),
    "bf16 states": (LLAMA, {**SHARDED, "zero_stage": 1}, {"optimizer": Optimizer.ADAMW_BF16}),
    "gradients cut": (LLAMA, {**SHARDED, "zero_stage": 2, "num_micro_batches": 2}, {}),
    "gradients of small layers cut": (
        TINY,
        {"data_parallel": 2, "zero_group": 2, "zero_stage": 2, "layers_per_stage": (12,)},
        {},
    ),
    "weights cut": (LLAMA, {**SHARDED, "zero_stage": 3, "recompute": Recompute.FULL}, {}),
    "tied weights cut": (SMALL, {**SHARDED, "zero_stage": 3}, {}),
    "optimizer on the host": (
        LLAMA,
        {**SHARDED, "zero_stage": 1, "offload": (Offload.OPTIMIZER,)},
        {},
    ),
    "states on the host": (
        LLAMA,
        {**SHARDED, "zero_stage": 3, "offload": (Offload.OPTIMIZER, Offload.PARAMETERS)},
        {},
    ),
    "activations on the host": (
        SMALL,
        {
            "data_parallel": 2,
            "zero_stage": 3,
            "zero_group": 2,
            "pipeline_parallel": 2,
            "layers_per_stage": (2, 2),
            "num_micro_batches": 4,
            "micro_batch_size": 4,
            "offload": (Offload.ACTIVATIONS,),
        },
        {},
    ),
    # Each expert lies on one rank alone: ZeRO-3 cuts and gathers everything but experts.
    "latent attention, experts whole": (
        LATENT,
        {
            "data_parallel": 8,
            "expert_parallel": 8,
            "zero_stage": 3,
            "zero_group": 8,
            "recompute": Recompute.FULL,
            "layers_per_stage": (2,),
        },
        {},
    ),
    "1f1b": (
        SMALL,
        {"pipeline_parallel": 2, "num_micro_batches": 4, "layers_per_stage": (1, 3)},
        {},
    ),
    "interleaved": (
        SMALL,
        {
            "pipeline_parallel": 2,
            "stages_per_rank": 2,
            "num_micro_batches": 4,
            "schedule": Schedule.INTERLEAVED,
            "layers_per_stage": (1, 1, 1, 1),
        },
        {},
    ),
}

SPLIT_BACKWARDS = {
    Schedule.ZERO_BUBBLE: {"num_micro_batches": 8, "layers_per_stage": (2,) * 4},
    Schedule.ZBV: {"num_micro_batches": 8, "stages_per_rank": 2, "layers_per_stage": (1,) * 8},
    Schedule.DUALPIPEV: {
        "num_micro_batches": 10,
        "stages_per_rank": 2,
        "layers_per_stage": (1,) * 8,
    },
}
CASES |= {
    f"{schedule}, recompute {recompute}": (
        replace(SMALL, num_layers=8),
        {
            "pipeline_parallel": 4,
            "micro_batch_size": 4,
            "schedule": schedule,
            "recompute": recompute,
            **sizes,
        },
        {},
    )
    for schedule, sizes in SPLIT_BACKWARDS.items()
    for recompute in (Recompute.NONE, Recompute.FULL)
}
CASES |= {
    # Gradients wait whole for nothing but their own layer's second half.
    f"zero-bubble, ZeRO-{stage}": (
        replace(LLAMA, num_layers=8),
        {
            **SHARDED,
            "pipeline_parallel": 4,
            "num_micro_batches": 8,
            "schedule": Schedule.ZERO_BUBBLE,
            "recompute": Recompute.FULL,
            "zero_stage": stage,
            "layers_per_stage": (2,) * 4,
        },
        {},
    )
    for stage in (1, 2)
}


SHARDED_PIPELINE = {
    "data_parallel": 4,
    "zero_group": 4,
    "zero_stage": 3,
    "pipeline_parallel": 2,
    "num_micro_batches": 4,
}
TWO_STAGES = {**SHARDED_PIPELINE, "layers_per_stage": (2, 2)}
CASES |= {
    # What is whole beside a layer depends on its neighbours: stages of one, two and three layers.
    "weights cut, two layers a stage": (LLAMA, {**TWO_STAGES, "recompute": Recompute.FULL}, {}),
    "weights cut, nothing recomputed": (
        LLAMA,
        {**SHARDED_PIPELINE, "layers_per_stage": (1, 3)},
        {},
    ),
    "weights cut, tensor parallel": (
        LLAMA,
        {**TWO_STAGES, "tensor_parallel": 2, "sequence_parallel": True},
        {},
    ),
    "weights cut, interleaved": (
        LLAMA,
        {
            **SHARDED_PIPELINE,
            "stages_per_rank": 2,
            "schedule": Schedule.INTERLEAVED,
            "recompute": Recompute.FULL,
            "layers_per_stage": (1, 1, 1, 1),
        },
        {},
    ),
    "weights cut, tied, one micro-batch": (
        SMALL,
        {**SHARDED_PIPELINE, "num_micro_batches": 1, "layers_per_stage": (1, 3)},
        {},
    ),
    # Each layer keeps what its experts answered, for the gradients of their weights.
    "experts, nothing recomputed": (
        EXPERTS,
        {"pipeline_parallel": 2, "num_micro_batches": 4, "layers_per_stage": (2, 2)},
        {},
    ),
    "experts, weights cut": (EXPERTS, {**TWO_STAGES, "recompute": Recompute.FULL}, {}),
    "experts spread, weights cut": (EXPERTS, {**TWO_STAGES, "expert_parallel": 2}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_live_peak_of_every_pipeline_rank_is_within_five_percent(case):
    model, axes, options = CASES[case]
    layout = Layout(**axes)
    # A dry run gives all experts equal shares.
    options = {"switches": Switches(balanced_routing=True), **options}
    job = TrainingJob(seq_len=1024, global_batch_size=layout.global_batch_size, **options)
    cluster = make_cluster(read_profile("h100-sxm-80gb"), layout.num_gpus, 4)
    memory = estimate_memory(model, job, cluster, layout)
    lowered = small.lowered(model, job, layout)
    for place, parts in enumerate(memory.per_rank):
        rank = place * layout.num_gpus // layout.pipeline_parallel
        graph = dry_run(lowered, job, layout, rank).peak
        assert parts.allocated == pytest.approx(graph, rel=0.05)
