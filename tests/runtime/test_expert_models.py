"""Our decoders with experts and latent attention give the logits of `transformers`."""

import pytest
import torch

from costmodels.hf_config import spec_from_hf_config
from runtime.models import build_model

transformers = pytest.importorskip("transformers")

SEQ = 24
SHAPE = {
    "vocab_size": 71,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
GROUPED = {**SHAPE, "num_key_value_heads": 2}
LATENT = {
    **SHAPE,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
CONFIGS = {
    "mixtral": ("Mixtral", {**GROUPED, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            **GROUPED,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 28,
            "decoder_sparse_step": 1,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **GROUPED,
            "head_dim": 8,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
        },
    ),
    "deepseek_v3": ("DeepseekV3", {**LATENT, "q_lora_rank": 18, "rope_parameters": YARN}),
    "deepseek_v3-plain": ("DeepseekV3", {**LATENT, "q_lora_rank": None}),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **LATENT,
            "q_lora_rank": 18,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 2.0,
        },
    ),
    "deepseek_v2-greedy": ("DeepseekV2", {**LATENT, "q_lora_rank": 18, "topk_method": "greedy"}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_transformers(name):
    family, facts = CONFIGS[name]
    config = getattr(transformers, f"{family}Config")(**facts)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{family}ForCausalLM")(config).double().eval()
    values = dict(theirs.named_parameters())
    for key, parameter in values.items():
        draw = torch.randn_like(parameter)
        parameter.data = 1 + draw / 4 if parameter.dim() == 1 and "norm" in key else draw / 4
    spec = spec_from_hf_config(config.to_dict(), name=name, source="test")
    ours = build_model(spec, seq_len=SEQ, dtype=torch.float64, device="cpu")
    assert {k: v.shape for k, v in ours.named_parameters()} == {
        k: v.shape for k, v in values.items()
    }
    for key, parameter in ours.named_parameters():
        parameter.data = values[key].data
    corrections = dict(theirs.named_buffers())
    for key, buffer in ours.named_buffers():
        if "correction" in key:
            corrections[key].copy_(torch.randn_like(buffer) / 4)
            buffer.copy_(corrections[key])
    tokens = torch.randint(0, 71, (2, SEQ))
    positions = torch.arange(SEQ).expand(2, -1)
    expected = theirs(input_ids=tokens, position_ids=positions, use_cache=False).logits
    got = ours(input_ids=tokens, position_ids=positions)
    # Rotary tables are fp32 in both.
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()
