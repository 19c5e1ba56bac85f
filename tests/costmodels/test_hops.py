"""Only the hops between domains take the network."""

from itertools import product

import numpy as np
import pytest

from costmodels.job import Target, TrainingJob
from costmodels.layout import Layout, Schedule, split_layers
from costmodels.layout_table import table_of
from costmodels.model import ModelSpec
from costmodels.profiles.reader import make_cluster, read_profile
from costmodels.time.layouts import layout_costs
from costmodels.time.stages import stage_hops

MODEL = ModelSpec(
    name="sixteen",
    architecture="llama",
    hidden_size=1024,
    num_layers=32,
    num_attention_heads=8,
    num_kv_heads=8,
    head_dim=128,
    ffn_hidden_size=4096,
    vocab_size=32000,
    training_seq_len=2048,
)


def hops_of(gpus, *, target=Target.NATIVE, **degrees):
    degrees = {"tensor_parallel": 1, "pipeline_parallel": 1, "stages_per_rank": 1} | degrees
    pipeline, stages = degrees["pipeline_parallel"], degrees["stages_per_rank"]
    layout = Layout(
        data_parallel=gpus // degrees["tensor_parallel"] // pipeline,
        sequence_parallel=degrees["tensor_parallel"] > 1,
        micro_batch_size=1,
        num_micro_batches=64,
        layers_per_stage=split_layers(MODEL.num_layers, pipeline * stages),
        **degrees,
    )
    job = TrainingJob(seq_len=2048, global_batch_size=64, target=target)
    cluster = make_cluster(read_profile("h100-sxm-80gb"), gpus)
    costs = layout_costs(MODEL, job, cluster, table_of([layout]))
    return stage_hops(layout, costs), costs.hops


def test_of_16_ranks_on_two_nodes_one_hop_takes_the_network():
    hops, costs = hops_of(16, pipeline_parallel=16)
    far, near = float(costs.far[0]), float(costs.near[0])
    assert near < far / 3
    assert hops == [near] * 7 + [far] + [near] * 7


def test_one_rank_a_node_makes_every_hop_take_the_network():
    hops, costs = hops_of(32, tensor_parallel=8, pipeline_parallel=4)
    assert hops == [float(costs.far[0])] * 3


def test_interleaved_stages_return_from_the_last_rank_to_the_first():
    looped = {"stages_per_rank": 2, "schedule": Schedule.INTERLEAVED}
    hops, costs = hops_of(16, pipeline_parallel=16, **looped)
    far = float(costs.far[0])
    assert [boundary for boundary, hop in enumerate(hops) if hop == far] == [7, 15, 23]
    assert hops[15] == float(costs.way_round[0])


def test_a_v_turns_round_on_the_last_rank_without_a_transfer():
    hops, _ = hops_of(16, pipeline_parallel=16, stages_per_rank=2, schedule=Schedule.ZBV)
    assert hops[15] == 0.0
    assert hops[:15] == hops[:15:-1]


@pytest.mark.parametrize(
    ("tensor", "pipeline", "target"),
    list(product((1, 2, 4, 8), (1, 2, 4, 8, 16, 32), (Target.NATIVE, Target.MEGATRON))),
)
def test_what_the_bounds_take_is_what_the_simulation_takes(tensor, pipeline, target):
    hops, costs = hops_of(256, target=target, tensor_parallel=tensor, pipeline_parallel=pipeline)
    assert float(costs.way[0]) == pytest.approx(sum(hops))
    ahead = [sum(hops[:rank]) for rank in range(pipeline)]
    assert float(costs.way_ahead[0]) == pytest.approx(np.mean(ahead))
