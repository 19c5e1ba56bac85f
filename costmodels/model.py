"""ModelSpec: what the planner knows of a network, and how many weights that makes.

Facts only, no files: readers live in `hf_config.py` (Hugging Face) and
`planner/presets/model_toml.py`.
Names follow Megatron: hidden_size H, num_layers L, num_attention_heads A, num_kv_heads G,
head_dim D, ffn_hidden_size F, vocab_size V.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from costmodels.config_keys import MAX_COUNT

MAX_LAYERS = 10_000  # chosen: an order above any published model; a slip of the pen is larger

_POSITIVE = (
    "hidden_size",
    "num_layers",
    "num_attention_heads",
    "num_kv_heads",
    "head_dim",
    "ffn_hidden_size",
    "vocab_size",
    "training_seq_len",
    "window_period",
)
_CHOICES: dict[str, tuple[str | int, ...]] = {
    "norm": ("rmsnorm", "layernorm", "nonparametric-layernorm"),
    "qk_norm": ("none", "per-head", "full"),
    "norms_per_layer": (1, 2, 4),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Attributes:
        q_lora_rank: Width of the compressed query; None where queries are projected directly.
        kv_lora_rank: Width of the compressed keys and values.
        qk_nope_head_dim: Query and key width per head without position.
        qk_rope_head_dim: Query and key width per head that carries RoPE (one key for all heads).
        v_head_dim: Value width per head.

    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        """Refuse widths that no head can have."""
        _require_at_least(1, self, "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
        _require_at_least(0, self, "qk_rope_head_dim")
        if self.q_lora_rank is not None:
            _require_at_least(1, self, "q_lora_rank")

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key of one head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOfExperts:
    """Routed experts of a feed-forward block.

    Attributes:
        num_experts: Routed experts per layer.
        experts_per_token: Experts that each token visits (top-k).
        ffn_hidden_size: Width of one routed expert.
        shared_ffn_hidden_size: Summed width of always-on experts; 0 without.
        num_dense_layers: Leading layers with a plain feed-forward block.
        router_bias: Trained bias in the router (gpt-oss); the bias that DeepSeek-V3 adjusts
            outside of training is a buffer and does not count.
        expert_bias: Biases in the experts' projections.
        shared_gate: A sigmoid gate of width 1 on the shared expert (Qwen2-MoE).
        scoring: "softmax" or "sigmoid".
        normalize_weights: The chosen experts' weights are scaled to sum to one.
        routed_scaling: Factor on the routed experts' sum.
        correction_bias: Selection uses scores plus a buffer (DeepSeek-V3).
        num_groups: Groups of experts for node-limited routing; 1 without limit.
        groups_per_token: Groups that a token may visit.
        balance_loss: Weight of the loss that evens out the experts' loads within each sequence
            (DeepSeek-V2, arXiv:2405.04434, equation 23), for the runtime only.

    """

    num_experts: int
    experts_per_token: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int = 0
    num_dense_layers: int = 0
    router_bias: bool = False
    expert_bias: bool = False
    shared_gate: bool = False
    scoring: str = "softmax"
    normalize_weights: bool = True
    routed_scaling: float = 1.0
    correction_bias: bool = False
    num_groups: int = 1
    groups_per_token: int = 1
    balance_loss: float = 0.0

    def __post_init__(self) -> None:
        """Refuse sizes that no layer can have."""
        _require_at_least(1, self, "num_experts", "experts_per_token", "ffn_hidden_size")
        _require_at_least(0, self, "shared_ffn_hidden_size", "num_dense_layers")
        _require_at_least(1, self, "num_groups", "groups_per_token")
        _require(
            self.experts_per_token <= self.num_experts,
            f"experts_per_token must be at most num_experts {self.num_experts}",
            self.experts_per_token,
        )
        _require(
            self.num_experts % self.num_groups == 0,
            f"num_groups must divide num_experts {self.num_experts}",
            self.num_groups,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """Layers that cost the same: attention window (None sees everything), experts or not."""

    window: int | None
    has_experts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer.

    Attributes:
        name: What people call it.
        architecture: Hugging Face `model_type`; decides parameter names.
        training_seq_len: Longest sequence of its own training.
        gated_ffn: Three matrices (SwiGLU, GeGLU) rather than two.
        norm: "rmsnorm", "layernorm" (which has biases) or "nonparametric-layernorm" (OLMo).
        norms_per_layer: Full-width norms in a layer: 2, 4 (Gemma-2) or 1 (Falcon parallel blocks).
        qk_norm: "none", "per-head" (width D) or "full" (width A * D and G * D).
        parallel_block: Attention and feed-forward read the same input (Falcon, GPT-NeoX).
        num_position_embeddings: Learned positions; 0 with RoPE or ALiBi.
        embedding_norm: A norm after the embedding (BLOOM).
        window: Sliding attention window, None without.
        window_period: Of each `window_period` layers all but the last use the window; 1 means all.
        attention_sinks: One learned logit per head (gpt-oss).
        num_mtp_layers: Multi-token-prediction blocks after the last layer, a fact of the config;
            parameter counts are of the main model, without them.
        whole_matrices: Weights of each layer in matrices that are neither attention nor
            feed-forward (of a traced module): every tensor-parallel rank applies all of them.
        whole_vectors: The same of vectors.
        rope_theta: None without rotary positions (learned ones, or ALiBi where there are none).
        rope_scaling: Key-value pairs of the config's rope_scaling, for the runtime only; lists
            and tables are JSON text.

    Raises:
        ValueError: Sizes that no network can have, or that contradict each other.

    """

    name: str
    architecture: str
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    training_seq_len: int
    gated_ffn: bool = True
    activation: str = "silu"
    norm: str = "rmsnorm"
    norm_epsilon: float = 1e-5
    norms_per_layer: int = 2
    qk_norm: str = "none"
    parallel_block: bool = False
    tied_embeddings: bool = False
    num_position_embeddings: int = 0
    embedding_norm: bool = False
    qkv_bias: bool = False
    attention_output_bias: bool = False
    ffn_bias: bool = False
    head_bias: bool = False
    attention_sinks: bool = False
    window: int | None = None
    window_period: int = 1
    rope_theta: float | None = 10000.0
    rope_fraction: float = 1.0
    rope_scaling: tuple[tuple[str, float | int | str], ...] = ()
    latent_attention: LatentAttention | None = None
    moe: MixtureOfExperts | None = None
    num_mtp_layers: int = 0
    whole_matrices: int = 0
    whole_vectors: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes that no network can have."""
        _require_at_least(1, self, *_POSITIVE)
        _require_at_least(0, self, "num_position_embeddings", "num_mtp_layers")
        _require_at_least(0, self, "whole_matrices", "whole_vectors")
        _require(self.norm_epsilon > 0, "norm_epsilon must be above 0", self.norm_epsilon)
        _require(
            0 < self.rope_fraction <= 1, "rope_fraction must lie in (0, 1]", self.rope_fraction
        )
        theta = self.rope_theta
        _require(theta is None or theta > 0, "rope_theta must be above 0", theta)
        _require(self.num_layers <= MAX_LAYERS, f"num_layers above {MAX_LAYERS}", self.num_layers)
        _require(
            self.num_attention_heads % self.num_kv_heads == 0,
            f"num_kv_heads must divide num_attention_heads {self.num_attention_heads}",
            self.num_kv_heads,
        )
        _require(self.window is None or self.window >= 1, "window must be at least 1", self.window)
        for name, allowed in _CHOICES.items():
            rule = f"{name} must be one of {', '.join(map(str, allowed))}"
            _require(getattr(self, name) in allowed, rule, getattr(self, name))
        if self.moe is not None:
            _require(
                self.moe.num_dense_layers <= self.num_layers,
                f"num_dense_layers must be at most num_layers {self.num_layers}",
                self.moe.num_dense_layers,
            )

    def layer_kind(self, layer: int) -> LayerKind:
        """Return what kind of layer stands at an index."""
        return self.layer_kinds[layer]

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer, in order; layers of one kind share the object."""
        dense = self.num_layers if self.moe is None else self.moe.num_dense_layers
        return _kinds_of_layers(self.num_layers, dense, self.window, self.window_period)

    @property
    def kinds_by_size(self) -> tuple[LayerKind, ...]:
        """The kinds that differ in more than their window, as they come; windows left out."""
        without_window = (replace(kind, window=None) for kind in dict.fromkeys(self.layer_kinds))
        return tuple(dict.fromkeys(without_window))


@lru_cache(maxsize=8)  # every price asks for them, and one search knows one model
def _kinds_of_layers(
    num_layers: int, num_dense_layers: int, window: int | None, window_period: int
) -> tuple[LayerKind, ...]:
    known: dict[LayerKind, LayerKind] = {}

    def kind_of(layer: int) -> LayerKind:
        is_global = window_period > 1 and layer % window_period == window_period - 1
        has_experts = layer >= num_dense_layers
        kind = LayerKind(window=None if is_global else window, has_experts=has_experts)
        return known.setdefault(kind, kind)

    return tuple(kind_of(layer) for layer in range(num_layers))


def _require(holds: bool, rule: str, given: object) -> None:
    if not holds:
        message = f"{rule}, not {given!r}"
        raise ValueError(message)


def _require_at_least(least: int, record: object, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        _require(value >= least, f"{name} must be at least {least}", value)
        _require(value <= MAX_COUNT, f"{name} must be at most {MAX_COUNT}", value)
