"""Bytes of model states on one rank: weights, gradients, optimizer, with ZeRO and expert axes.

A rank works on N weights: matrices over the tensor axis (keys and values at most once per head),
norms whole, experts over ep * etp. Optimizer states are cut over the g ranks of a ZeRO group;
stage 2 cuts gradients too, stage 3 the weights:

    parameters  w N / g_3      w = 2 in 16-bit precisions
    gradients   b N / g_2      b = 2 or 4, as the target does
    optimizer   o N / g_1      o = 12 for Adam with fp32 master weights and moments

Experts are cut over their own data-parallel group, g * tp / (ep * etp) ranks, at least one.

Source: Rajbhandari et al. 2020 (arXiv:1910.02054, section 3); expert groups: Megatron Core's
expert data parallelism.
"""

from sympy import Expr

from costmodels.formulas.functions import AtLeast, Formula, Maximum, Select
from costmodels.symbols import Quantity

sharded_weights = Quantity("sharded_weights", "1", "weights that the tensor axis cuts")
key_value_weights = Quantity("key_value_weights", "1", "weights of keys and values")
replicated_weights = Quantity("replicated_weights", "1", "weights whole on every rank")
expert_weights = Quantity("expert_weights", "1", "weights of routed experts")
tensor_parallel = Quantity("tensor_parallel", "1", "ranks that cut matrices")
key_value_shards = Quantity("key_value_shards", "1", "pieces of keys and values; heads at most")
expert_shards = Quantity("expert_shards", "1", "expert_parallel * expert_tensor_parallel")
zero_stage = Quantity("zero_stage", "1", "0 none, 1 optimizer, 2 gradients too, 3 weights too")
zero_group = Quantity("zero_group", "1", "ranks that a state is cut over")
weight_bytes = Quantity("weight_bytes", "bytes", "one working weight")
resident_bytes = Quantity("resident_bytes", "bytes", "one weight of a shard under ZeRO-3")
gradient_bytes = Quantity("gradient_bytes", "bytes", "one gradient")
optimizer_bytes = Quantity("optimizer_bytes", "bytes", "one weight's optimizer states")


def dense_weights() -> Expr:
    """Return the weights of a rank that are no routed experts'."""
    return (
        sharded_weights / tensor_parallel
        + key_value_weights / key_value_shards
        + replicated_weights
    )


def local_expert_weights() -> Expr:
    """Return the weights of a rank's routed experts."""
    return expert_weights / expert_shards


def _expert_group() -> Expr:
    return Maximum(1, zero_group * tensor_parallel / expert_shards)


def _cut(stage: int, per_weight: Expr, whole: Expr) -> Expr:
    """Return bytes that are cut from a ZeRO stage on, and `whole` per weight before."""
    cut = per_weight * (dense_weights() / zero_group + local_expert_weights() / _expert_group())
    full = whole * (dense_weights() + local_expert_weights())
    return Select(AtLeast(zero_stage, stage), cut, full)


def parameters() -> Expr:
    """Return bytes of working weights that stay on the rank."""
    return _cut(3, resident_bytes, weight_bytes)


def gradients() -> Expr:
    """Return bytes of gradients that stay on the rank."""
    return _cut(2, gradient_bytes, gradient_bytes)


def optimizer() -> Expr:
    """Return bytes of master weights and moments."""
    return _cut(1, optimizer_bytes, optimizer_bytes)


def cut_weights() -> Expr:
    """Return the weights of a rank that more than one rank shares the states of."""
    dense = Select(AtLeast(zero_group, 2), dense_weights(), 0)
    return dense + Select(AtLeast(_expert_group(), 2), local_expert_weights(), 0)


def formulas() -> tuple[Formula, ...]:
    """Return the formulas of this module."""
    return (
        Formula(
            name="model_states",
            summary="Bytes of the states of some weights on one rank, and how many it works on.",
            results=(
                ("parameters", parameters()),
                ("gradients", gradients()),
                ("optimizer", optimizer()),
                ("local_weights", dense_weights() + local_expert_weights()),
                ("cut_weights", cut_weights()),
            ),
        ),
    )
