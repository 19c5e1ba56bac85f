"""Seconds of moving gradients and weights: buckets by target, and one price for one traffic."""

import numpy as np
import pytest

from costmodels.hardware import make_cluster
from costmodels.job import Target, TrainingJob
from costmodels.layout import Layout
from costmodels.layout_table import table_of
from costmodels.model import LayerKind, ModelSpec
from costmodels.profiles.reader import read_profile
from costmodels.time.collectives import collective_seconds
from costmodels.time.placement import place
from costmodels.time.rank_weights import layer_weights
from costmodels.time.rates import rates_of
from costmodels.time.states import block_gathers, state_costs

RANKS = 256
CLUSTER = make_cluster(read_profile("h100-sxm-80gb"), RANKS)
MODEL = ModelSpec(
    name="dense",
    architecture="llama",
    hidden_size=4096,
    num_layers=4,
    num_attention_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn_hidden_size=14336,
    vocab_size=32768,
    training_seq_len=4096,
)
# Two square matrices, two of a quarter, three of the feed-forward block, two norms.
LAYER = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
KIND = LayerKind(window=None, has_experts=False)


def costs_of(target, *, zero_stage):
    layout = Layout(
        data_parallel=RANKS, zero_stage=zero_stage, zero_group=RANKS, layers_per_stage=(4,)
    )
    job = TrainingJob(seq_len=4096, global_batch_size=RANKS, target=target)
    table = table_of([layout])
    rates, placement = rates_of(job, CLUSTER.profile), place(table, CLUSTER)
    weights = layer_weights(MODEL, job, KIND, table)
    return (
        state_costs(job, table, placement, rates, [weights]),
        block_gathers(weights, job, table, placement, rates),
        lambda kind, payload: collective_seconds(kind, payload, placement.zero, rates),
    )


@pytest.mark.parametrize(
    ("target", "values"),
    [
        (Target.NATIVE, LAYER),
        (Target.MEGATRON, 256e6),  # 1e6 a rank; 40e6 at least
        (Target.DEEPSPEED, 500e6),
        (Target.NANOTRON, 25 * 2**20 / 4),
    ],
)
def test_weights_of_stage_1_are_gathered_in_the_targets_buckets(target, values):
    states, _, seconds = costs_of(target, zero_stage=1)
    dense, _ = states.gather
    assert dense * values == pytest.approx(seconds("all_gather", 2 * np.array([values])))


def test_native_moves_a_layer_of_stage_1_at_the_price_of_stage_3():
    states, _, _ = costs_of(Target.NATIVE, zero_stage=1)
    _, gathers, _ = costs_of(Target.NATIVE, zero_stage=3)
    assert LAYER * states.gather[0] == pytest.approx(gathers.forward)
    assert LAYER * states.reduce[0] == pytest.approx(gathers.reduce)
