"""What a search asks of memory is what `estimate_memory` says, by fewer ranks."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.hardware import make_cluster
from costmodels.job import Target, TrainingJob
from costmodels.layout import Layout, Offload, Recompute, Schedule, split_layers
from costmodels.memory.estimate import blocks_of_layout, estimate_memory, memory_demand
from costmodels.memory.ranks import telling_ranks
from costmodels.model import MixtureOfExperts, ModelSpec
from costmodels.profiles.reader import read_profile

PROFILE = read_profile("h100-sxm-80gb")
DENSE = ModelSpec(
    name="dense",
    architecture="llama",
    hidden_size=1024,
    num_layers=24,
    num_attention_heads=8,
    num_kv_heads=4,
    head_dim=128,
    ffn_hidden_size=2816,
    vocab_size=32768,
    training_seq_len=2048,
)
EXPERTS = replace(
    DENSE,
    moe=MixtureOfExperts(
        num_experts=8, experts_per_token=2, ffn_hidden_size=1024, num_dense_layers=5
    ),
)
OFFLOADS = ((), (Offload.OPTIMIZER,), (Offload.ACTIVATIONS,))


@st.composite
def layouts(draw):
    """Pipelines of 2 to 8 ranks with any split of 24 layers."""
    schedule = draw(st.sampled_from(list(Schedule)))
    pipeline, chunks = draw(st.sampled_from([2, 4, 6, 8])), 1
    if schedule in (Schedule.INTERLEAVED, Schedule.ZBV, Schedule.DUALPIPEV):
        chunks = 2
    stages = pipeline * chunks
    inner = draw(st.sets(st.integers(1, 23), min_size=stages - 1, max_size=stages - 1))
    split = tuple(b - a for a, b in pairwise((0, *sorted(inner), 24)))
    return Layout(
        data_parallel=2,
        pipeline_parallel=pipeline,
        zero_stage=draw(st.sampled_from([0, 1, 2, 3])),
        zero_group=2,
        micro_batch_size=draw(st.sampled_from([1, 4])),
        num_micro_batches=pipeline * draw(st.sampled_from([2, 3])),
        stages_per_rank=chunks,
        schedule=schedule,
        recompute=draw(st.sampled_from(list(Recompute))),
        recompute_layers=draw(st.sampled_from([0, 1, 2])),
        offload=draw(st.sampled_from(OFFLOADS)),
        layers_per_stage=draw(st.sampled_from([split, split_layers(24, stages)])),
    )


@given(
    layout=layouts(),
    model=st.sampled_from([DENSE, EXPERTS]),
    target=st.sampled_from(list(Target)),
)
@settings(max_examples=300, deadline=None)
def test_the_fullest_rank_and_the_host_are_those_of_the_estimate(layout, model, target):
    job = TrainingJob(seq_len=2048, global_batch_size=layout.global_batch_size, target=target)
    inputs = model, job, make_cluster(PROFILE, 16), layout
    demand, estimate = memory_demand(*inputs, blocks_of_layout(*inputs)), estimate_memory(*inputs)
    assert demand.reserved == max(rank.reserved for rank in estimate.per_rank)
    assert demand.host_per_node == estimate.host_per_node


def test_of_equal_stages_the_ends_and_the_first_between_tell():
    """Rank r of 1F1B holds p - r micro-batches, so that of ranks 1 to 6 the first is fullest."""
    layout = Layout(pipeline_parallel=8, num_micro_batches=16, layers_per_stage=(3,) * 8)
    assert telling_ranks(DENSE, layout) == (0, 1, 7)
    assert telling_ranks(EXPERTS, layout) == (0, 1, 2, 7)  # layers 3 and 4 have no experts
