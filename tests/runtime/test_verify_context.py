"""The dry run agrees with the counts where the context axis splits sequences."""

import lowering_models as small
import pytest

from costmodels.counts.ranks import count_rank
from costmodels.layout import ContextParallelType, Layout, Recompute
from runtime.dry_run import run as dry
from runtime.dry_run.trackers import Message
from runtime.verify import bytes_by_axis, disagreements

CASES = {
    "cp2": {},
    "cp4": {"context_parallel": 4},
    "full": {"recompute": Recompute.FULL},
    "selective": {"recompute": Recompute.SELECTIVE},
    "tp": {"tensor_parallel": 2, "sequence_parallel": True},
    "pp": {"pipeline_parallel": 2, "layers_per_stage": (1, 3)},
    "zero3": {"data_parallel": 2, "zero_stage": 3, "zero_group": 4},
}


def layout(kind, **changes):
    base = {"layers_per_stage": (4,), "num_micro_batches": 4, "context_parallel": 2}
    return Layout(**{**base, "context_parallel_type": kind, **changes})


def run_and_count(model, plan):
    spec, job = small.MODELS[model], small.job()
    lowered = small.lowered(spec, job, plan)
    for place in range(plan.pipeline_parallel):
        first = place * plan.num_gpus // plan.pipeline_parallel
        yield dry.dry_run(lowered, job, plan, first), count_rank(spec, job, plan, place)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ContextParallelType)
def test_flops_and_bytes_of_split_sequences_equal_the_counts(kind, name):
    runs = []
    for run, counts in run_and_count("llama", layout(kind, **CASES[name])):
        assert run.flops == counts.flops
        found = {axis: count for axis, count in bytes_by_axis(run).items() if count}
        assert found == dict(counts.num_bytes)
        runs.append(run)
    assert disagreements(runs) == []


def test_every_context_rank_computes_and_sends_the_same():
    for kind in ContextParallelType:
        plan = layout(kind, context_parallel=4)
        lowered = small.lowered(small.MODELS["llama"], small.job(), plan)
        runs = [dry.dry_run(lowered, small.job(), plan, rank) for rank in range(4)]
        assert len({run.flops for run in runs}) == 1
        assert len({tuple(sorted(run.num_bytes.items())) for run in runs}) == 1
        assert disagreements(runs) == []


def test_one_layer_of_a_ring_carries_keys_and_values_by_hand():
    """(cp - 1) steps forward; backward brings them again, and their gradients."""
    plan = layout(ContextParallelType.RING, context_parallel=4, num_micro_batches=1)
    job = small.job()
    ((run, _),) = run_and_count("llama", plan)
    element = 4  # fp32
    values = (job.seq_len // 4) * 4 * 4  # tokens, key-value heads, width
    assert run.num_bytes["cp"] == 4 * 3 * (3 * 2 * values * element)  # layers, steps, passes


def test_fewer_key_heads_than_ulysses_ranks_are_sent_to_each():
    plan = layout(ContextParallelType.ULYSSES, context_parallel=4, tensor_parallel=2)
    ((run, counts),) = run_and_count("llama", plan)  # 2 key heads on each tensor rank
    assert run.num_bytes["cp"] == dict(counts.num_bytes)["cp"]


def ring_run(rank, *messages):
    return dry.RankRun(rank=rank, flops=0, num_bytes={}, peak=0, messages=messages)


def test_a_ring_rank_answers_for_peers_that_were_not_run():
    ring = {"ranks": (0, 1, 2), "num_elements": 2, "tag": 0}
    sent = Message(operation="send", peer=1, num_bytes=8, **ring)
    received = Message(operation="receive", peer=2, num_bytes=8, **ring)
    assert disagreements([ring_run(0, sent, received)]) == []
    larger = Message(operation="receive", peer=2, num_bytes=16, **ring)
    assert disagreements([ring_run(0, sent, larger)]) == [
        "rank 0 sends other messages than rank 1 receives"
    ]
