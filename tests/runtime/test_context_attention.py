"""Attention over a split sequence against attention over the whole one, on real gloo ranks."""

from dataclasses import replace
from functools import partial

import lowering_models as small
import pytest
import torch
from torch.nn import functional

from costmodels.job import TrainingJob
from costmodels.layout import ContextParallelType, Layout
from costmodels.profiles.reader import make_cluster, read_profile
from planner.rules import violations
from runtime.context import context_positions, context_share
from runtime.launch import run_ranks
from runtime.ops.gathered_attention import (
    gathered_attention,
    gathered_parts,
    recomputed_gathered_attention,
)
from runtime.ops.ring_attention import recomputed_ring_attention, ring_attention, ring_part
from runtime.ops.ulysses_attention import to_heads, to_tokens

H100 = read_profile("h100-sxm-80gb")
KINDS = list(ContextParallelType)


def layout_of(kind, num_ranks):
    return Layout(context_parallel=num_ranks, context_parallel_type=kind, layers_per_stage=(1,))


def ulysses_attention(q, k, v, mesh, scale=None):
    heads = [to_heads(x, mesh) for x in (q, k, v)]
    out = functional.scaled_dot_product_attention(
        *heads, is_causal=True, enable_gqa=True, scale=scale
    )
    return to_tokens(out, mesh)


FORMS = {
    ContextParallelType.RING: (ring_attention, recomputed_ring_attention),
    ContextParallelType.ALL_GATHER: (gathered_attention, recomputed_gathered_attention),
    ContextParallelType.ULYSSES: (ulysses_attention,),
}


def operands(shape, dtype):
    heads, key_heads, length, width, value_width = shape
    generator = torch.Generator().manual_seed(3)
    shapes = [(heads, width), (key_heads, width), (key_heads, value_width), (heads, value_width)]
    return [
        torch.randn(2, count, length, size, generator=generator, dtype=torch.float64).to(dtype)
        for count, size in shapes
    ]


def whole_attention(q, k, v, gradient, scale):
    """Return output and gradients in float64, written out."""
    q, k, v = (x.to(torch.float64, copy=True).requires_grad_() for x in (q, k, v))
    repeats = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(repeats, 1) for x in (k, v))
    scores = q @ keys.transpose(-1, -2) * scale
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    out = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values
    out.backward(gradient.double())
    return [out.detach(), q.grad, k.grad, v.grad]


def errors_of(world, cases):
    """Return, per case, this rank's worst error of output and gradients."""
    found = []
    for function, kind, shape, dtype, scale in cases:
        layout = layout_of(kind, world.size)
        mesh = world.mesh(layout)
        places = context_positions(shape[2], layout, world.rank)
        *inputs, gradient = operands(shape, dtype)
        truth = whole_attention(*inputs, gradient, scale)
        local = [x[:, :, places].requires_grad_() for x in inputs]
        out = function(*local, mesh, scale=scale)
        out.backward(gradient[:, :, places])
        got = [out.detach(), *(x.grad for x in local)]
        found.append(
            max(float((a - b[:, :, places]).abs().max()) for a, b in zip(got, truth, strict=True))
        )
        assert all(x.dtype == dtype for x in got)
    return found


# heads, key-value heads, tokens, width, width of values
SHAPES = {
    "as many key heads": (4, 4, 16, 8, 8),
    "grouped": (8, 4, 32, 4, 4),
    "one key head": (4, 1, 16, 4, 4),
    "narrow values": (4, 4, 16, 6, 4),
}


def cases(dtype, shapes):
    for kind in KINDS:
        for function in FORMS[kind]:
            for name in shapes:
                yield function, kind, SHAPES[name], dtype, 0.3


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-9), (torch.float32, 2e-5), (torch.bfloat16, 0.15)],
    ids=str,
)
def test_split_attention_equals_whole_attention_forward_and_backward(num_ranks, dtype, tolerance):
    chosen = list(cases(dtype, SHAPES))
    for errors in run_ranks(partial(errors_of, cases=chosen), num_ranks, timeout=120):
        assert len(errors) == len(chosen)
        for error, case in zip(errors, chosen, strict=True):
            assert error < tolerance, (case[0].__name__, case[2])


def test_a_ring_of_three_ranks_equals_whole_attention():
    shape = (2, 2, 12, 4, 4)
    chosen = [
        (ring_attention, ContextParallelType.RING, shape, torch.float64, 0.5),
        (gathered_attention, ContextParallelType.ALL_GATHER, shape, torch.float64, 0.5),
    ]
    for errors in run_ranks(partial(errors_of, cases=chosen), 3, timeout=60):
        assert max(errors) < 1e-9


def test_without_a_scale_it_is_the_root_of_the_width():
    shape = (2, 2, 8, 4, 4)
    chosen = [(ring_attention, ContextParallelType.RING, shape, torch.float64, 1 / 2)]

    def work(world):
        explicit = errors_of(world, chosen)
        mesh = world.mesh(layout_of(ContextParallelType.RING, 2))
        places = context_positions(8, mesh.layout, world.rank)
        q, k, v, _ = (x[:, :, places] for x in operands(shape, torch.float64))
        same = ring_attention(q, k, v, mesh) - ring_attention(q, k, v, mesh, scale=1 / 2)
        return [*explicit, float(same.abs().max())]

    for errors in run_ranks(work, 2, timeout=60):
        assert max(errors) < 1e-9


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8, 16])
def test_all_ranks_of_a_ring_compute_the_same_number_of_pairs_in_every_step(num_ranks):
    length = 6 * num_ranks
    share = length // num_ranks
    for step in range(num_ranks):
        pairs = {
            ring_part(rank, (rank - step) % num_ranks, share).num_pairs for rank in range(num_ranks)
        }
        assert pairs == {share * share / 2}


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8, 16])
def test_all_ranks_compute_the_same_number_of_pairs_with_gathered_keys(num_ranks):
    share = 4
    sums = {
        sum(part.num_pairs for part in gathered_parts(rank, num_ranks, share))
        for rank in range(num_ranks)
    }
    # Half of the whole square, over the ranks.
    assert sums == {(share * num_ranks) ** 2 / 2 / num_ranks}


def seen(rank, num_ranks, length, parts_of_owner):
    """Return which keys each of a rank's queries meets, as [query place, key place]."""
    layout = layout_of(ContextParallelType.RING, num_ranks)
    mine = context_positions(length, layout, rank)
    met = torch.zeros(length, length, dtype=torch.long)
    for owner, part in parts_of_owner:
        places = torch.arange(length) if owner is None else context_positions(length, layout, owner)
        queries, keys = mine[part.rows], places[part.columns]
        block = torch.ones(len(queries), len(keys), dtype=torch.long)
        met[queries[:, None], keys[None]] += block.tril() if part.is_causal else block
    return met


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_query_meets_each_key_up_to_its_own_place_exactly_once(num_ranks):
    length = 4 * num_ranks
    share = length // num_ranks
    ring = sum(
        seen(r, num_ranks, length, [(j, ring_part(r, j, share)) for j in range(num_ranks)])
        for r in range(num_ranks)
    )
    gathered = sum(
        seen(r, num_ranks, length, [(None, p) for p in gathered_parts(r, num_ranks, share)])
        for r in range(num_ranks)
    )
    expected = torch.ones(length, length, dtype=torch.long).tril()
    assert torch.equal(ring, expected)
    assert torch.equal(gathered, expected)


# Shares of the sequence.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_hold_every_token_once(kind, num_ranks):
    layout = layout_of(kind, num_ranks)
    shares = [context_positions(16, layout, rank) for rank in range(num_ranks)]
    assert torch.equal(torch.cat(shares).sort().values, torch.arange(16))
    assert {len(share) for share in shares} == {16 // num_ranks}


def test_a_ring_rank_holds_an_early_and_a_late_chunk():
    ring = layout_of(ContextParallelType.RING, 2)
    assert context_positions(8, ring, 0).tolist() == [0, 1, 6, 7]
    assert context_positions(8, ring, 1).tolist() == [2, 3, 4, 5]
    runs = layout_of(ContextParallelType.ULYSSES, 2)
    assert context_positions(8, runs, 1).tolist() == [4, 5, 6, 7]


def test_a_share_holds_tokens_labels_and_positions_of_the_same_places():
    layout = layout_of(ContextParallelType.RING, 2)
    ids = torch.arange(100, 116).view(2, 8)
    share = context_share({"input_ids": ids, "labels": ids + 1}, layout, 1)
    assert share["input_ids"].tolist() == [[102, 103, 104, 105], [110, 111, 112, 113]]
    assert torch.equal(share["labels"], share["input_ids"] + 1)
    assert share["position_ids"].tolist() == [[2, 3, 4, 5]] * 2


def test_a_share_keeps_positions_that_the_batch_has():
    layout = layout_of(ContextParallelType.ULYSSES, 2)
    ids = torch.arange(8).view(1, 8)
    batch = {"input_ids": ids, "labels": ids, "position_ids": ids * 10}
    assert context_share(batch, layout, 1)["position_ids"].tolist() == [[40, 50, 60, 70]]


def test_one_context_rank_holds_the_batch_as_it_is():
    batch = {"input_ids": torch.zeros(1, 4), "labels": torch.ones(1, 4)}
    assert context_share(batch, Layout(layers_per_stage=(1,)), 0) == batch


def test_a_sequence_that_does_not_cut_is_refused_with_both_numbers():
    layout = layout_of(ContextParallelType.RING, 2)
    with pytest.raises(ValueError, match="6 tokens does not cut into the 4 equal chunks"):
        context_positions(6, layout, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_rule_refuses_the_lengths_that_the_runtime_cannot_cut(kind, num_ranks):
    """And names the nearest that it can: nothing is padded."""
    layout, cluster = layout_of(kind, num_ranks), make_cluster(H100, num_ranks, num_ranks)
    layout = replace(layout, zero_group=num_ranks, layers_per_stage=(small.NUM_LAYERS,))
    for length in range(2, 34):
        job = TrainingJob(seq_len=length, global_batch_size=1)
        broken = {v.rule: v for v in violations(small.llama(), job, cluster, layout)}
        try:
            shares = {len(context_positions(length, layout, rank)) for rank in range(num_ranks)}
        except ValueError:
            legal = broken["sequence_divides"].allowed["seq_len"]
            assert all(abs(near - length) < 2 * num_ranks for near in legal)
            assert legal or length < 2 * num_ranks
        else:
            assert "sequence_divides" not in broken
            assert len(shares) == 1
