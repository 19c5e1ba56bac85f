"""The dry run of layers with experts agrees with the counts, under equal shares for all experts."""

import lowering_models as small
import pytest

from costmodels.counts.ranks import count_rank
from costmodels.layout import Layout, Recompute
from costmodels.model import LatentAttention, MixtureOfExperts
from runtime.dry_run import run as dry
from runtime.verify import bytes_by_axis

pytestmark = pytest.mark.matrix  # 64 dry runs take minutes


def experts(**changes):
    facts = {"num_experts": 4, "experts_per_token": 2, "ffn_hidden_size": 24}
    return MixtureOfExperts(**{**facts, **changes})


MODELS = {
    "mixtral": small.llama(architecture="mixtral", moe=experts()),
    "qwen2_moe": small.llama(
        architecture="qwen2_moe",
        qkv_bias=True,
        moe=experts(shared_ffn_hidden_size=40, shared_gate=True),
    ),
    "dense-first": small.llama(
        architecture="deepseek_v3", moe=experts(shared_ffn_hidden_size=40, num_dense_layers=1)
    ),
    "latent": small.llama(
        architecture="deepseek_v3",
        num_kv_heads=8,
        head_dim=6,
        latent_attention=LatentAttention(
            q_lora_rank=10, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=6
        ),
        moe=experts(shared_ffn_hidden_size=40, balance_loss=0.01),
    ),
}


def layout(**changes):
    zero = changes.get("zero_stage", 0)
    group = {"zero_group": changes.get("data_parallel", 1)} if zero else {}
    facts = {"layers_per_stage": (4,), "num_micro_batches": 4}
    return Layout(**{**facts, **group, **changes})


SP = {"tensor_parallel": 2, "sequence_parallel": True}
FULL = {"recompute": Recompute.FULL}
LAYOUTS = {
    "one": layout(),
    "full": layout(**FULL),
    "dp": layout(data_parallel=2),
    "ep": layout(data_parallel=2, expert_parallel=2),
    "ep-full": layout(data_parallel=2, expert_parallel=2, **FULL),
    "ep-half": layout(data_parallel=4, expert_parallel=2),
    "tp": layout(tensor_parallel=2),
    "tp-full": layout(tensor_parallel=2, **FULL),
    "tp-ep": layout(tensor_parallel=2, expert_parallel=2),
    "sp-etp": layout(expert_tensor_parallel=2, **SP, **FULL),
    "sp-dp-ep-etp": layout(data_parallel=2, expert_parallel=2, expert_tensor_parallel=2, **SP),
    "zero1": layout(data_parallel=4, expert_parallel=2, zero_stage=1),
    "zero2-hsdp": layout(data_parallel=4, expert_parallel=2, zero_stage=2, zero_group=2),
    "zero3": layout(data_parallel=4, expert_parallel=2, zero_stage=3),
    "zero3-of-6": layout(data_parallel=6, expert_parallel=2, zero_stage=3),
    "zero1-of-10": layout(data_parallel=10, expert_parallel=2, zero_stage=1),
    "zero3-sp": layout(data_parallel=2, expert_parallel=2, zero_stage=3, **SP),
    "pp": layout(
        data_parallel=2, expert_parallel=2, pipeline_parallel=2, layers_per_stage=(1, 3), **FULL
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_flops_and_bytes_of_experts_equal_the_counts_exactly(model, name):
    spec, plan_layout, job = MODELS[model], LAYOUTS[name], small.job()
    lowered = small.lowered(spec, job, plan_layout)
    for place in range(plan_layout.pipeline_parallel):
        first = place * plan_layout.num_gpus // plan_layout.pipeline_parallel
        run = dry.dry_run(lowered, job, plan_layout, first)
        counts = count_rank(spec, job, plan_layout, place)
        found = {axis: count for axis, count in bytes_by_axis(run).items() if count}
        assert found == dict(counts.num_bytes)
        assert run.flops == counts.flops
