"""Which splits of layers over stages are legal, by target."""

import pytest
from small_worlds import cluster, job, layout, llama_8b

from costmodels.job import Target
from planner.rules import violations


@pytest.mark.parametrize(
    ("target", "split", "rules"),
    [
        (Target.MEGATRON, (0, *[1] * 30, 0), set()),
        (Target.MEGATRON, (1, *[1] * 29, 0, 0), {"stages_hold_layers"}),
        (Target.NATIVE, (0, *[1] * 30, 0), {"stages_hold_layers"}),
        (Target.MEGATRON, (0, *[1] * 28, 0), {"layers_per_stage_has_every_stage"}),
    ],
)
def test_megatron_lets_embedding_and_head_have_stages_of_their_own(target, split, rules):
    spec = llama_8b(num_layers=sum(split))
    task = job(target=target, global_batch_size=64)
    lay = layout(spec, task, 32, pipeline_parallel=32, layers_per_stage=split)
    found = {violation.rule for violation in violations(spec, task, cluster(32, 8), lay)}
    assert rules <= found
    assert rules or not found


def test_ends_that_stand_alone_do_not_hide_what_would_help():
    spec = llama_8b(num_layers=30)
    task = job(target=Target.MEGATRON, global_batch_size=63)
    split = (0, *[1] * 30, 0)
    lay = layout(spec, task, 64, pipeline_parallel=32, layers_per_stage=split)
    (found,) = violations(spec, task, cluster(64, 8), lay)
    assert found.allowed["global_batch_size"] == (62, 64)
