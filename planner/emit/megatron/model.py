"""The network as Megatron-LM arguments.

Source: NVIDIA/Megatron-LM `megatron/training/arguments.py`, Megatron-Core 0.15 (October 2025):
groups "network size", "moe" and "mla".
"""

from costmodels.job import Target, TrainingJob
from costmodels.model import MixtureOfExperts, ModelSpec
from planner.emit.emission import CannotExpress

Option = tuple[str, ...]


def model_options(model: ModelSpec, job: TrainingJob) -> tuple[Option, ...]:
    """Return the options that describe the network.

    Raises:
        CannotExpress: Megatron-LM's command line has no such block, norm or position.

    """
    _refuse_foreign_blocks(model)
    hidden = model.num_attention_heads * model.head_dim
    options: list[Option] = [
        ("--num-layers", str(model.num_layers)),
        ("--hidden-size", str(model.hidden_size)),
        ("--ffn-hidden-size", str(model.ffn_hidden_size)),
        ("--num-attention-heads", str(model.num_attention_heads)),
    ]
    if model.num_kv_heads != model.num_attention_heads:
        options += [("--group-query-attention",), ("--num-query-groups", str(model.num_kv_heads))]
    if hidden != model.hidden_size and model.latent_attention is None:
        options.append(("--kv-channels", str(model.head_dim)))
    options += [
        ("--normalization", "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm"),
        ("--norm-epsilon", repr(model.norm_epsilon)),
        *_positions(model, job),
        *_activation(model),
        *_biases(model),
        *_attention(model),
    ]
    if not model.tied_embeddings:
        options.append(("--untie-embeddings-and-output-weights",))
    if model.moe is not None:
        options += _experts(model, model.moe, job)
    return tuple(options)


def _refuse_foreign_blocks(model: ModelSpec) -> None:
    refused = {
        "norms without weights (OLMo)": model.norm == "nonparametric-layernorm",
        "parallel attention and feed-forward blocks": model.parallel_block,
        "a norm after the embedding": model.embedding_norm,
        f"{model.norms_per_layer} norms per layer": model.norms_per_layer != 2,  # noqa: PLR2004
        "norms over all queries and keys": model.qk_norm == "full",
        "a bias of the output head": model.head_bias,
        "ALiBi positions": model.rope_theta is None and model.num_position_embeddings == 0,
    }
    for what, is_there in refused.items():
        if is_there:
            raise CannotExpress(Target.MEGATRON, f"{what} ({model.architecture})")


def _positions(model: ModelSpec, job: TrainingJob) -> list[Option]:
    if model.rope_theta is None:
        positions = model.num_position_embeddings
        if job.seq_len > positions:
            what = f"sequences of {job.seq_len} with {positions} learned positions"
            raise CannotExpress(Target.MEGATRON, what, f"--seq-len at most {positions}")
        return [
            ("--position-embedding-type", "learned_absolute"),
            ("--max-position-embeddings", str(positions)),
        ]
    if not model.rope_theta.is_integer():
        raise CannotExpress(Target.MEGATRON, f"a rotary base of {model.rope_theta} (whole numbers)")
    options: list[Option] = [
        ("--position-embedding-type", "rope"),
        ("--max-position-embeddings", str(max(model.training_seq_len, job.seq_len))),
        ("--rotary-base", str(int(model.rope_theta))),
    ]
    if model.rope_fraction != 1:
        options.append(("--rotary-percent", repr(model.rope_fraction)))
    return options + _rope_scaling(model)


def _rope_scaling(model: ModelSpec) -> list[Option]:
    scaling = dict(model.rope_scaling)
    kind = scaling.get("rope_type", scaling.get("type"))
    factor = scaling.get("factor", 1)
    if not scaling:
        return [("--rope-type", "rope")] if model.latent_attention else []
    if kind == "llama3":
        return [("--use-rope-scaling",), ("--rope-scaling-factor", str(factor))]
    if kind == "linear" and float(factor).is_integer():
        return [("--rotary-seq-len-interpolation-factor", str(int(float(factor))))]
    raise CannotExpress(Target.MEGATRON, f"rotary scaling of type {kind} (llama3, linear)")


def _activation(model: ModelSpec) -> list[Option]:
    if model.architecture == "gpt_oss":  # its config says silu; the model clamps and shifts
        return [
            ("--quick-geglu",),
            ("--activation-func-clamp-value", "7.0"),
            ("--glu-linear-offset", "1.0"),
        ]
    if model.gated_ffn and model.activation in ("silu", "swish"):
        return [("--swiglu",)]
    if not model.gated_ffn and model.activation.startswith("gelu"):
        return []  # Megatron's default
    if not model.gated_ffn and model.activation == "relu2":
        return [("--squared-relu",)]
    gate = "a gated" if model.gated_ffn else "an ungated"
    raise CannotExpress(Target.MEGATRON, f"{gate} {model.activation} activation")


def _biases(model: ModelSpec) -> list[Option]:
    ffn = model.moe.expert_bias if model.moe else model.ffn_bias
    given = (model.qkv_bias, model.attention_output_bias, ffn)
    by_biases: dict[tuple[bool, bool, bool], list[Option]] = {
        (True, True, True): [],
        (False, False, False): [("--disable-bias-linear",)],
        (True, False, False): [("--disable-bias-linear",), ("--add-qkv-bias",)],
    }
    if given not in by_biases:
        raise CannotExpress(
            Target.MEGATRON,
            "biases in some blocks only "
            f"(query-key-value {given[0]}, attention output {given[1]}, feed-forward {given[2]})",
        )
    return by_biases[given]


def _attention(model: ModelSpec) -> list[Option]:
    options: list[Option] = []
    if model.qk_norm == "per-head" or model.latent_attention is not None:
        options.append(("--qk-layernorm",))
    if model.attention_sinks:
        options.append(("--softmax-type", "learnable"))
    if model.window is not None:
        options.append(
            ("--window-size", f"{model.window - 1},0")
        )  # tokens to the left, itself aside
        if model.window_period > 1:
            options.append(("--window-attn-skip-freq", str(model.window_period)))
    latent = model.latent_attention
    if latent is None:
        return options
    options.append(("--multi-latent-attention",))
    if latent.q_lora_rank is not None:
        options.append(("--q-lora-rank", str(latent.q_lora_rank)))
    return [
        *options,
        ("--kv-lora-rank", str(latent.kv_lora_rank)),
        ("--qk-head-dim", str(latent.qk_nope_head_dim)),
        ("--qk-pos-emb-head-dim", str(latent.qk_rope_head_dim)),
        ("--v-head-dim", str(latent.v_head_dim)),
    ]


def _experts(model: ModelSpec, moe: MixtureOfExperts, job: TrainingJob) -> list[Option]:
    if moe.shared_gate:
        raise CannotExpress(Target.MEGATRON, "a gate on the shared expert (Qwen2-MoE)")
    dense, routed = moe.num_dense_layers, model.num_layers - moe.num_dense_layers
    options: list[Option] = [
        ("--num-experts", str(moe.num_experts)),
        ("--moe-router-topk", str(moe.experts_per_token)),
        ("--moe-ffn-hidden-size", str(moe.ffn_hidden_size)),
        ("--moe-router-score-function", moe.scoring),
    ]
    if dense:
        options.append(("--moe-layer-freq", f"([0]*{dense}+[1]*{routed})"))
    if moe.shared_ffn_hidden_size:
        size = str(moe.shared_ffn_hidden_size)
        options.append(("--moe-shared-expert-intermediate-size", size))
    if moe.scoring == "softmax" and not moe.normalize_weights:
        options.append(("--moe-router-pre-softmax",))
    if moe.routed_scaling != 1:
        options.append(("--moe-router-topk-scaling-factor", repr(moe.routed_scaling)))
    if moe.num_groups > 1:
        options.append(("--moe-router-num-groups", str(moe.num_groups)))
        options.append(("--moe-router-group-topk", str(moe.groups_per_token)))
    if moe.correction_bias:
        options.append(("--moe-router-enable-expert-bias",))
    balance = "none" if moe.correction_bias else "aux_loss"
    options.append(("--moe-router-load-balancing-type", balance))
    if job.switches.balanced_routing:
        options.append(("--moe-router-force-load-balancing",))
    return options
