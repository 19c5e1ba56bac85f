"""Collectives against the whole computed in one process, on real gloo ranks."""

import pytest
import torch
from torch.nn import functional

from costmodels.layout import Layout
from runtime.communication import collectives
from runtime.launch import run_ranks
from runtime.ops import vocab_parallel


def tensor_parallel(num_ranks):
    return Layout(tensor_parallel=num_ranks, layers_per_stage=(1,))


def filled(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def worst(a, b):
    return float((a - b).abs().max())


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_exchange_equals_the_whole_forward_and_backward(num_ranks):
    def work(world):
        mesh = world.mesh(tensor_parallel(num_ranks))
        rank, n = world.rank, num_ranks
        errors = {}
        shards = [filled(2, 3, 4, seed=r) for r in range(n)]
        own = shards[rank].clone().requires_grad_()
        gathered = collectives.all_gather(own, mesh, "tp", 1)
        weights = [filled(2, 3 * n, 4, seed=10 + r) for r in range(n)]
        (gathered * weights[rank]).sum().backward()
        errors["all_gather"] = worst(gathered, torch.cat(shards, 1))
        expected = sum(weights).chunk(n, 1)[rank]
        errors["all_gather backward"] = worst(own.grad, expected)
        errors["contiguous"] = 0.0 if gathered.is_contiguous() else 1.0

        whole = [filled(2, 3 * n, 4, seed=20 + r) for r in range(n)]
        own = whole[rank].clone().requires_grad_()
        piece = collectives.reduce_scatter(own, mesh, "tp", 1)
        (piece * shards[rank]).sum().backward()
        errors["reduce_scatter"] = worst(piece, sum(whole).chunk(n, 1)[rank])
        errors["reduce_scatter backward"] = worst(own.grad, torch.cat(shards, 1))

        own = whole[rank].clone().requires_grad_()
        total = collectives.reduce_from(own, mesh, "tp")
        (total * 2).sum().backward()
        errors["reduce_from"] = worst(total, sum(whole))
        errors["reduce_from backward"] = worst(own.grad, torch.full_like(own, 2.0))

        own = whole[0].clone().requires_grad_()
        copy = collectives.copy_to(own, mesh, "tp")
        (copy * weights[rank]).sum().backward()
        errors["copy_to"] = worst(copy, whole[0])
        errors["copy_to backward"] = worst(own.grad, sum(weights))

        own = whole[0].clone().requires_grad_()
        part = collectives.split(own, mesh, "tp", 1)
        (part * shards[rank]).sum().backward()
        errors["split"] = worst(part, whole[0].chunk(n, 1)[rank])
        errors["split backward"] = worst(own.grad, torch.cat(shards, 1))

        own = shards[rank].clone().requires_grad_()
        alike = collectives.gather_replicated(own, mesh, "tp", 1)
        (alike * weights[0]).sum().backward()
        errors["gather_replicated backward"] = worst(own.grad, weights[0].chunk(n, 1)[rank])
        return errors

    for errors in run_ranks(work, num_ranks):
        assert len(errors) == 12
        assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("length", [1, 5, 7, 40_000])
def test_all_reduce_of_any_length_gives_every_rank_the_same_bits(num_ranks, length):
    def work(world):
        mesh = world.mesh(tensor_parallel(num_ranks))
        group = mesh.group("tp")
        parts = [filled(length, seed=r).float() for r in range(num_ranks)]
        total = collectives.all_reduce(parts[world.rank], group)
        largest = collectives.all_reduce(parts[world.rank], group, "max")
        return {
            "sum": worst(total, sum(parts)),
            "max": worst(largest, torch.stack(parts).amax(0)),
            "digest": total.double().mul(torch.arange(1, length + 1)).sum().item(),
        }

    results = run_ranks(work, num_ranks)
    assert max(result["sum"] for result in results) < 1e-5
    assert max(result["max"] for result in results) == 0
    assert len({result["digest"] for result in results}) == 1


def test_all_to_all_with_uneven_rows_sends_gradients_back_where_rows_came_from():
    rows = [[1, 2], [0, 3]]  # rows[sender][receiver]

    def work(world):
        mesh = world.mesh(tensor_parallel(2))
        own = (filled(sum(rows[world.rank]), 2) + 10 * world.rank).requires_grad_()
        incoming = [rows[sender][world.rank] for sender in range(2)]
        received = collectives.all_to_all(own, mesh, "tp", incoming, rows[world.rank])
        (received * (world.rank + 1)).sum().backward()
        return [received.tolist(), own.grad.tolist()]

    (first, first_grad), (second, second_grad) = run_ranks(work, 2)
    a, b = filled(3, 2), filled(3, 2) + 10
    assert first == a[:1].tolist()
    assert second == torch.cat((a[1:], b)).tolist()
    assert first_grad == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
    assert second_grad == [[2.0, 2.0]] * 3


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_vocab_parallel_embedding_and_loss_equal_torch_with_a_padded_vocabulary(num_ranks):
    vocab, padded, hidden = 10, 12, 3

    def work(world):
        mesh = world.mesh(tensor_parallel(num_ranks))
        table = torch.cat((filled(vocab, hidden), torch.zeros(2, hidden, dtype=torch.float64)))
        ids = torch.tensor([[0, 9, 3], [7, 5, 9]])
        labels = torch.tensor([9, -100, 3, 0, 6, -100])
        piece = table.chunk(num_ranks)[world.rank].clone().requires_grad_()
        partial = vocab_parallel.vocab_parallel_embedding(piece, ids, mesh, "tp")
        x = collectives.reduce_from(partial, mesh, "tp").view(-1, hidden)
        x = collectives.copy_to(x, mesh, "tp")
        loss = vocab_parallel.vocab_parallel_cross_entropy(
            x @ piece.T, labels, mesh, "tp", vocab, -100
        )
        loss.backward()

        whole = table[:vocab].clone().requires_grad_()
        logits = functional.embedding(ids, whole).view(-1, hidden) @ whole.T
        expected = functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
        expected.backward()
        rows = torch.cat((whole.grad, torch.zeros(padded - vocab, hidden)))
        return [
            abs(float(loss - expected)),
            worst(piece.grad, rows.chunk(num_ranks)[world.rank]),
        ]

    for loss_error, gradient_error in run_ranks(work, num_ranks):
        assert loss_error < 1e-12
        assert gradient_error < 1e-12


def test_sixteen_bit_terms_are_summed_in_fp32():
    def work(world):
        group = world.mesh(tensor_parallel(4)).group("tp")
        # 256 + 1 is 256 in bf16, whose numbers lie 2 apart there: a sum that rounds stays.
        full = torch.full((8,), 256.0 if world.rank == 0 else 1.0, dtype=torch.bfloat16)
        return collectives.start_reduce_scatter(full, group).wait().tolist()

    assert run_ranks(work, 4) == [[260.0, 260.0]] * 4  # 259, to the even neighbour
