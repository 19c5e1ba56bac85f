"""Routing, grouped products and the dispatch of tokens, against plain formulas."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from costmodels.layout import Layout
from runtime.communication import collectives
from runtime.launch import run_ranks
from runtime.ops.experts import dispatched_experts, whole_experts
from runtime.ops.grouped import fused, grouped_linear
from runtime.ops.routing import Routing, choose, scores_of
from runtime.ops.rows import put, spread, take

HIDDEN, WIDTH, EXPERTS, TOP = 8, 4, 8, 2
PLAIN = (TOP, "softmax", True, 1.0, 1, 1, 0.0)


def test_softmax_routing_by_hand():
    logits = torch.log(torch.tensor([[0.5, 0.1, 0.3, 0.1]]))
    routing = Routing(top_k=2)
    experts, weights = choose(scores_of(logits, routing), None, routing)
    assert experts.tolist() == [[0, 2]]
    assert weights.tolist() == [pytest.approx([0.625, 0.375])]


def test_a_correction_changes_the_choice_and_not_the_weights():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    routing = Routing(top_k=1, scoring="sigmoid", normalize=False, scaling=2.5)
    scores = scores_of(logits, routing)
    experts, weights = choose(scores, torch.tensor([0.0, 0.0, 0.0, 5.0]), routing)
    assert experts.tolist() == [[3]]
    assert weights.item() == pytest.approx(2.5 * torch.tensor(-1.0).sigmoid().item())


def test_groups_bar_the_best_expert_of_a_poor_group():
    # Groups (0.9, 0.0), (0.6, 0.5): one judge takes the first, two judges the second.
    scores = torch.tensor([[0.9, 0.0, 0.6, 0.5]])
    routing = Routing(top_k=1, scoring="sigmoid", num_groups=2, groups_per_token=1)
    assert choose(scores, None, routing)[0].tolist() == [[0]]
    assert choose(scores, torch.zeros(4), routing)[0].tolist() == [[2]]


@given(counts=st.lists(st.integers(0, 4), min_size=1, max_size=5), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_grouped_products_equal_one_product_per_expert(counts, seed):
    torch.manual_seed(seed)
    x = torch.randn(sum(counts), 3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(len(counts), 5, 3, dtype=torch.float64, requires_grad=True)
    out = grouped_linear(x, weights, counts)
    runs = zip(x.split(counts), weights, strict=True)
    expected = torch.cat([rows @ matrix.t() for rows, matrix in runs])
    torch.testing.assert_close(out, expected)
    gradient = torch.randn_like(out)
    got = torch.autograd.grad(out, (x, weights), gradient)
    wanted = torch.autograd.grad(expected, (x, weights), gradient)
    torch.testing.assert_close(got, wanted)


def test_torchs_grouped_kernel_does_the_same_in_bf16():
    torch.manual_seed(0)
    counts = (3, 0, 5)
    x = torch.randn(8, 16, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.randn(3, 8, 16, dtype=torch.bfloat16, requires_grad=True)
    one, other = grouped_linear(x, weights, counts), fused(x, weights, counts)
    torch.testing.assert_close(one, other, rtol=0.02, atol=0.05)
    gradient = torch.randn_like(one)
    gradients = (torch.autograd.grad(y, (x, weights), gradient) for y in (one, other))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.05)


def test_moving_rows_is_differentiable_and_puts_them_back():
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    order = torch.tensor([4, 0, 2, 5, 1, 3])
    inverse = order.argsort()
    copies = spread(x, order, inverse)
    assert torch.equal(take(copies, inverse), x.repeat_interleave(2, 0))
    places = torch.tensor([3, 0, 1])
    assert torch.equal(take(put(x, places, 5), places), x)
    assert put(x, places, 5)[2].tolist() == [0, 0]
    assert torch.autograd.gradcheck(lambda t: spread(t, order, inverse), x)
    assert torch.autograd.gradcheck(lambda t: take(t, places[1:]), x)
    assert torch.autograd.gradcheck(lambda t: put(t, places, 5), x)


def operands(seed, num_tokens, num_experts=EXPERTS):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return (
        draw(1, num_tokens, HIDDEN),
        draw(num_experts, HIDDEN),
        draw(num_experts, 2 * WIDTH, HIDDEN),
        draw(num_experts, HIDDEN, WIDTH),
    )


def every_expert_on_every_token(x, router, gate_up, down):
    """All experts on all tokens, most of them weighed with zero."""
    scores = (x @ router.t()).softmax(-1)
    best, chosen = scores.topk(TOP, -1)
    weights = torch.zeros_like(scores).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
    gate, up = torch.einsum("bsh,efh->bsef", x, gate_up).chunk(2, -1)
    hidden = functional.silu(gate) * up
    return torch.einsum("bsef,ehf,bse->bsh", hidden, down, weights)


def test_the_whole_block_equals_every_expert_on_every_token():
    values = [value.requires_grad_() for value in operands(0, 10)]
    x, router, gate_up, down = values
    got = whole_experts(x, router, None, gate_up, down, *PLAIN)
    expected = every_expert_on_every_token(*values)
    torch.testing.assert_close(got, expected)
    gradient = torch.randn_like(got)
    torch.testing.assert_close(
        torch.autograd.grad(got, values, gradient), torch.autograd.grad(expected, values, gradient)
    )


def dispatch_error(world, layout, lengths, skew):
    """Compare this rank's answers and gradients with the whole block's."""
    mesh = world.mesh(layout)
    router, gate_up, down = operands(0, 1)[1:]
    parts = [operands(1 + rank, length)[0] for rank, length in enumerate(lengths)]
    if skew:  # everybody prefers the first expert: other ranks hold rows of nobody
        router = torch.cat((router[:1] * 0, router[1:] * 0 - 1), 0)
        parts = [part.abs() for part in parts]
    whole = [torch.cat(parts, 1), router, gate_up, down]
    whole = [value.requires_grad_() for value in whole]
    reference = every_expert_on_every_token(*whole)
    wanted = torch.autograd.grad(reference.square().sum(), whole)
    own = slice(sum(lengths[: world.rank]), sum(lengths[: world.rank + 1]))
    ep, etp = mesh.coordinate("ep"), mesh.coordinate("etp")
    first, count = ep * EXPERTS // mesh.size("ep"), EXPERTS // mesh.size("ep")
    width = WIDTH // mesh.size("etp")

    def cut(gate_up, down):
        gate, up = gate_up[first : first + count].chunk(2, 1)
        columns = slice(etp * width, (etp + 1) * width)
        return torch.cat((gate[:, columns], up[:, columns]), 1), down[first : first + count][
            ..., columns
        ]

    x = parts[world.rank].clone().requires_grad_()
    local = [value.detach().clone().requires_grad_() for value in cut(gate_up, down)]
    got = dispatched_experts(x, router.detach(), None, *local, mesh, 1.0, None, *PLAIN)
    found = torch.autograd.grad(got.square().sum(), (x, *local))
    summed = [collectives.all_reduce(gradient, mesh.group("edp")) for gradient in found[1:]]
    pairs = [
        (got, reference[:, own]),
        (found[0], wanted[0][:, own]),
        *zip(summed, cut(*wanted[2:]), strict=True),
    ]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in pairs if len(a))


@pytest.mark.parametrize("skew", [False, True], ids=["even", "one-expert-takes-most"])
def test_dispatch_over_ranks_equals_the_whole_block(skew):
    layouts = [
        Layout(
            data_parallel=4, expert_parallel=ep, expert_tensor_parallel=etp, layers_per_stage=(1,)
        )
        for ep, etp in ((4, 1), (2, 1), (2, 2), (1, 4), (1, 2))
    ]
    lengths = (3, 7, 1, 5)

    def work(world):
        return [dispatch_error(world, layout, lengths, skew) for layout in layouts]

    for errors in run_ranks(work, 4, timeout=120):
        assert len(errors) == len(layouts)
        assert max(errors) < 1e-12, errors
