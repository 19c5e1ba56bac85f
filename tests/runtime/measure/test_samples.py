"""What is measured: the right work, with the arguments that its formula needs."""

import pytest
import torch

from runtime.launch import run_ranks
from runtime.measure import kernels, transfers
from runtime.measure.samples import from_json, sample, to_json, typical_of


class OneCallWatch:
    """Runs each call once and pretends that it took a millisecond."""

    device = torch.device("cpu")

    def seconds(self, call):
        call()
        return 1e-3


@pytest.fixture
def small_shapes(monkeypatch):
    shapes = kernels.Shapes(
        products=((8, 16, 32),), lengths=(16,), num_heads=2, passes=(1024, 4096)
    )
    monkeypatch.setitem(kernels.SHAPES, "cpu", shapes)
    monkeypatch.setitem(kernels.ROUND_BYTES, "cpu", 24576)


def test_samples_survive_the_way_to_the_parent():
    one = sample("gemm", "bf16", 0.25, m=1, n=2, k=3, count=1, element_bytes=2)
    assert from_json(to_json(one)) == one
    assert one.flops == 12
    assert one["k"] == 3


def test_the_median_of_several_rounds_is_taken_operation_by_operation():
    def taken(*seconds):
        return [sample("empty", "fp32", s) for s in seconds]

    assert typical_of([taken(1.0, 9.0), taken(2.0, 4.0), taken(3.0, 6.0)]) == taken(2.0, 6.0)
    with pytest.raises(ValueError, match="argument"):
        typical_of([taken(1.0), taken(1.0, 2.0)])


def test_kernels_cover_every_formula_in_both_formats(small_shapes):
    taken = list(kernels.kernel_samples(OneCallWatch()))
    counts = {}
    for one in taken:
        key = (one.formula, one.precision)
        counts[key] = counts.get(key, 0) + 1
    assert counts == {
        ("empty", "fp32"): 1,
        ("memory_pass", "fp32"): 2,
        **{("gemm", p): 2 for p in ("fp32", "bf16")},
        **{(f"attention_{d}", p): 1 for d in ("forward", "backward") for p in ("fp32", "bf16")},
    }


def test_a_linear_layer_is_measured_forward_and_for_its_weight(small_shapes):
    forward, weight = (
        s
        for s in kernels.kernel_samples(OneCallWatch())
        if (s.formula, s.precision) == ("gemm", "fp32")
    )
    assert [forward[a] for a in ("m", "n", "k")] == [8, 32, 16]
    assert [weight[a] for a in ("m", "n", "k")] == [32, 16, 8]
    assert forward.flops == weight.flops == 2 * 8 * 16 * 32
    assert forward["element_bytes"] == 4


def test_a_pass_is_shared_out_over_the_tensors_that_stay_alive(small_shapes):
    small, large = (s for s in kernels.kernel_samples(OneCallWatch()) if s.formula == "memory_pass")
    assert (small["moved"], large["moved"]) == (3 * 1024, 3 * 4096)
    assert (small.seconds, large.seconds) == (1e-3 / 8, 1e-3 / 2)


def test_causal_attention_counts_half_the_square_and_two_and_a_half_times_it_backward(
    small_shapes,
):
    forward, backward = (
        next(s for s in kernels.kernel_samples(OneCallWatch()) if s.formula == name)
        for name in ("attention_forward", "attention_backward")
    )
    assert forward["attention_flops"] == 2 * 2 * 16 * 16 * 64  # 4 S^2 d per head, halved
    assert backward["attention_flops"] == 2.5 * forward["attention_flops"]


@pytest.mark.parametrize(
    ("ranks", "sizes"), [(1, ()), (2, (2,)), (4, (2, 4)), (6, (2, 3, 6)), (7, (7,))]
)
def test_groups_divide_the_ranks(ranks, sizes):
    assert transfers.group_sizes(ranks) == sizes


def test_exchanges_do_what_their_formula_is_about():
    def work(world):
        mesh = transfers._mesh_of_groups(world, 2)
        x = torch.arange(4.0) + 10 * world.rank
        results = {name: [] for name, _ in transfers.EXCHANGES}
        for name, exchange in transfers.EXCHANGES:
            results[name].append(exchange(x, mesh).flatten().tolist())
        return results

    first, second = run_ranks(work, 2)
    gathered, scattered = first["all_gather"]
    assert gathered == [0, 1, 10, 11]
    assert scattered == [10, 12]
    assert second["all_gather"][1] == [14, 16]
    assert first["all_reduce"] == second["all_reduce"] == [[2, 2, 2, 2]]
    assert first["all_to_all"] == [[0, 1, 10, 11]]
    assert second["all_to_all"] == [[2, 3, 12, 13]]
    assert first["send"] == [[10, 11, 12, 13]]
    assert second["send"] == [[0, 1, 2, 3]]


def test_exchanges_count_what_they_add_to_the_work_around_them():
    class Clock:
        def __init__(self, both):
            self.answers = {"x": 1e-3, "w": 2e-3, "wx": both}

        def seconds(self, call):
            log.clear()
            call()
            return self.answers["".join(log)]

    log = []
    for both, added in ((3.5e-3, 1.5e-3), (1e-3, 0.5e-3)):  # less than nothing is noise
        seconds = transfers._seconds_between(
            Clock(both), lambda: log.append("x"), lambda: log.append("w")
        )
        assert seconds == pytest.approx(added)


def test_transfers_are_measured_in_groups_of_every_size(monkeypatch):
    monkeypatch.setitem(transfers.SIZES, "cpu", (1024, 4096))

    def work(world):
        taken = transfers.transfer_samples(OneCallWatch(), world, shares_cores=True)
        return [[s.formula, s["payload"], dict(s.arguments).get("inner")] for s in taken]

    results = run_ranks(work, 4)
    assert all(result == results[0] for result in results)
    assert len(results[0]) == 2 * 2 * len(transfers.EXCHANGES)
    assert {(size, inner) for name, size, inner in results[0] if name == "all_reduce"} == {
        (1024, 2),
        (4096, 2),
        (1024, 4),
        (4096, 4),
    }
    assert {inner for name, _, inner in results[0] if name == "send"} == {None}
