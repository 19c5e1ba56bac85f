"""Roles: ranks of one run the same program, and every rank has one."""

from dataclasses import replace

import lowering_models as small
import pytest

from costmodels.layout import ContextParallelType, Layout, Recompute
from costmodels.model import MixtureOfExperts
from runtime.dry_run.rank_roles import rank_roles
from runtime.dry_run.run import dry_run

EXPERTS = MixtureOfExperts(num_experts=4, experts_per_token=2, ffn_hidden_size=24)
PADDED, EVEN = small.llama(vocab_size=95), small.llama(vocab_size=96)
WIDE = Layout(
    data_parallel=2,
    tensor_parallel=2,
    context_parallel=2,
    pipeline_parallel=2,
    sequence_parallel=True,
    zero_group=4,
    recompute=Recompute.FULL,
    layers_per_stage=(1, 3),
)


def test_a_plain_plan_has_a_role_for_each_stage():
    roles = rank_roles(EVEN, small.job(), replace(WIDE, context_parallel=1))
    assert [(role.stage_rank, role.ranks) for role in roles] == [
        (0, (0, 1, 2, 3)),
        (1, (4, 5, 6, 7)),
    ]


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        (ContextParallelType.RING, 2),
        (ContextParallelType.ALL_GATHER, 2),
        (ContextParallelType.ULYSSES, 1),
    ],
)
def test_places_on_the_context_axis_are_roles_where_attention_sees_them(kind, count):
    roles = rank_roles(EVEN, small.job(), replace(WIDE, context_parallel_type=kind))
    assert len(roles) == 2 * count
    assert sorted(rank for role in roles for rank in role.ranks) == list(range(16))


def test_ranks_with_fewer_real_columns_of_the_vocabulary_are_a_role():
    layout = replace(WIDE, context_parallel=1, pipeline_parallel=1)
    roles = rank_roles(PADDED, small.job(), replace(layout, layers_per_stage=(4,)))
    assert [role.ranks for role in roles] == [(0, 2), (1, 3)]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (PADDED, WIDE),
        (
            small.llama(architecture="mixtral", moe=EXPERTS, vocab_size=96),
            replace(WIDE, context_parallel_type=ContextParallelType.ULYSSES, expert_parallel=2),
        ),
    ],
    ids=["padded ring", "experts"],
)
def test_every_rank_runs_as_the_first_of_its_role(model, layout):
    """Without ZeRO, whose pieces of a state hold other numbers of small tensors."""
    lowered = small.lowered(model, small.job(), layout)
    for role in rank_roles(model, small.job(), layout):
        first, last = (dry_run(lowered, small.job(), layout, role.ranks[at]) for at in (0, -1))
        assert (last.flops, last.num_bytes) == (first.flops, first.num_bytes)
        assert last.peak == first.peak
