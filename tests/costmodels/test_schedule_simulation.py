"""The simulator against a slow reference, closed forms of the papers, and its lower bounds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.layout import Schedule
from costmodels.layout_table import SCHEDULES
from costmodels.schedule import (
    Action,
    ActionKind,
    PipelineShape,
    PipelineSums,
    StageDurations,
    build_schedule,
    makespan_lower_bound,
    shape_refusals,
    simulate,
    table_from_strings,
    timeline,
)
from costmodels.schedule.critical_path import critical_path

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT  # noqa: E741


def equal(num_stages, forward=1.0, backward_input=1.0, backward_weight=1.0):
    return StageDurations(
        forward=(forward,) * num_stages,
        backward_input=(backward_input,) * num_stages,
        backward_weight=(backward_weight,) * num_stages,
    )


def build(shape):
    return build_schedule(
        shape.schedule, shape.pipeline_parallel, shape.stages_per_rank, shape.num_micro_batches
    )


@st.composite
def problems(draw, max_ranks=5, max_micro_batches=12):
    """A shape, random durations of every stage, a transfer time per boundary."""
    shape = PipelineShape(
        schedule=draw(st.sampled_from(list(Schedule))),
        pipeline_parallel=draw(st.integers(1, max_ranks)),
        stages_per_rank=draw(st.integers(1, 3)),
        num_micro_batches=draw(st.integers(1, max_micro_batches)),
    )
    while refusals := shape_refusals(shape):
        names = ("pipeline_parallel", "stages_per_rank", "num_micro_batches")
        sizes = {name: getattr(shape, name) for name in names}
        sizes[refusals[0].parameter] = refusals[0].allowed[0]
        shape = PipelineShape(schedule=shape.schedule, **sizes)
    seconds = st.floats(0.01, 4.0)
    stages = shape.num_stages

    def column(count=stages):
        return tuple(draw(st.lists(seconds, min_size=count, max_size=count)))

    durations = StageDurations(forward=column(), backward_input=column(), backward_weight=column())
    transfers = column(stages - 1) if draw(st.booleans()) else (0.0,) * (stages - 1)
    return shape, durations, transfers


def reference(table, durations, transfers, *, overlaps):
    """Start and end of every action by the definition, tried again and again until none is left."""
    shape = table.shape
    seconds = {
        F: durations.forward,
        I: durations.backward_input,
        W: durations.backward_weight,
        B: tuple(map(sum, zip(durations.backward_input, durations.backward_weight, strict=True))),
    }
    rows = [list(table.actions(rank)) for rank in range(shape.pipeline_parallel)]
    free = [0.0] * len(rows)
    arrives, spans = {}, {}

    def transfer(stage, peer):
        ranks = shape.rank_of_stage
        return 0.0 if ranks[stage] == ranks[peer] else transfers[min(stage, peer)]

    while any(rows):
        for rank, row in enumerate(rows):
            if not row:
                continue
            action = row[0]
            s, m = action.stage, action.micro_batch
            needs = None
            if action.kind is F and s > 0:
                needs = ("output", s - 1, m)
            if action.kind in (B, I) and s < shape.num_stages - 1:
                needs = ("gradient", s + 1, m)
            if needs is not None and needs not in arrives:
                continue
            start = max(free[rank], arrives.get(needs, 0.0))
            end = start + seconds[action.kind][s]
            spans[rank, action] = (start, end)
            free[rank] = end
            peer = s + 1 if action.kind is F else s - 1
            if action.kind is not W and 0 <= peer < shape.num_stages:
                late = end + transfer(s, peer)
                arrives["output" if action.kind is F else "gradient", s, m] = late
                if not overlaps:
                    free[rank] = late
            row.pop(0)
    return spans, max(free)


@given(problem=problems(), overlaps=st.booleans())
@settings(deadline=None, max_examples=150)
def test_simulation_equals_the_slow_reference(problem, overlaps):
    shape, durations, transfers = problem
    table = build(shape)
    spans, makespan = reference(table, durations, transfers, overlaps=overlaps)
    result = simulate(table, durations, transfers, p2p_overlaps=overlaps)
    assert result.makespan == pytest.approx(makespan, rel=1e-12)
    for interval in timeline(table, durations, transfers, p2p_overlaps=overlaps):
        start, end = spans[interval.rank, interval.action]
        assert interval.start == pytest.approx(start, rel=1e-9, abs=1e-12)
        assert interval.end == pytest.approx(end, rel=1e-9, abs=1e-12)


@given(problem=problems(), overlaps=st.booleans(), seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=150)
def test_a_critical_path_bounds_other_durations_and_measures_its_own(problem, overlaps, seed):
    shape, durations, transfers = problem
    table, rng = build(shape), np.random.default_rng(seed)
    path = critical_path(table, durations, transfers, p2p_overlaps=overlaps)
    crosses = np.diff(shape.rank_of_stage) != 0
    seconds = np.array([durations.forward, durations.backward_input, durations.backward_weight])
    scale, hop_scale = rng.uniform(0.2, 5.0, seconds.shape), rng.uniform(0.0, 5.0, crosses.shape)
    for work, hops, is_own in (
        (seconds, np.array(transfers), True),
        (seconds * scale, transfers * hop_scale, False),
    ):
        forward, to_input, to_weight = (tuple(part) for part in work.tolist())
        others = StageDurations(forward=forward, backward_input=to_input, backward_weight=to_weight)
        makespan = simulate(table, others, hops.tolist(), p2p_overlaps=overlaps).makespan
        length = path.seconds(work[None], np.where(crosses, hops, 0.0)[None])[0]
        assert length <= makespan * (1 + 1e-12)
        assert not is_own or length == pytest.approx(makespan, rel=1e-12)


@given(problem=problems())
@settings(deadline=None)
def test_busy_seconds_are_the_sum_of_a_ranks_work(problem):
    shape, durations, transfers = problem
    result = simulate(build(shape), durations, transfers)
    m = shape.num_micro_batches
    for rank, busy in enumerate(result.busy):
        stages = [s for s, r in enumerate(shape.rank_of_stage) if r == rank]
        work = sum(
            durations.forward[s] + durations.backward_input[s] + durations.backward_weight[s]
            for s in stages
        )
        assert busy == pytest.approx(m * work)
        assert result.idle[rank] == pytest.approx(result.makespan - m * work)


@pytest.mark.parametrize("schedule", [Schedule.GPIPE, Schedule.ONE_F_ONE_B])
@pytest.mark.parametrize("pp", [1, 2, 3, 8])
@pytest.mark.parametrize("m", [1, 3, 8, 33])
def test_bubble_of_equal_stages_is_the_papers(schedule, pp, m):
    result = simulate(build_schedule(schedule, pp, 1, m), equal(pp, 1.0, 1.5, 0.5))
    assert result.bubble_fraction == pytest.approx((pp - 1) / (m + pp - 1))
    assert result.makespan == pytest.approx(3 * (m + pp - 1))


@pytest.mark.parametrize("pp", [2, 4, 5])
@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_interleaving_divides_the_bubble_by_the_stages_per_rank(pp, v, rounds):
    m = rounds * pp
    result = simulate(build_schedule(Schedule.INTERLEAVED, pp, v, m), equal(pp * v, 1.0, 1.0, 1.0))
    busy = 3 * m * v
    assert result.makespan - busy == pytest.approx(3 * (pp - 1))  # v times less than 3 v (pp - 1)


@pytest.mark.parametrize("pp", [2, 4, 7])
@pytest.mark.parametrize("m", [7, 8, 20])
@pytest.mark.parametrize(("f", "i", "w"), [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (2.0, 2.0, 1.0)])
def test_zb_h1_is_idle_for_forward_plus_input_minus_weight_per_rank(pp, m, f, i, w):
    # Qi et al., ICLR 2024, table 1
    result = simulate(build_schedule(Schedule.ZERO_BUBBLE, pp, 1, m), equal(pp, f, i, w))
    assert result.makespan == pytest.approx(m * (f + i + w) + (pp - 1) * (f + i - w))


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("extra", [0, 1, 9])
def test_zbv_of_equal_durations_has_no_bubble_but_the_one_of_filling(pp, extra):
    # Every rank but the first waits only for its first input; weight gradients fill the rest.
    m = 2 * pp - 1 + extra
    result = simulate(build_schedule(Schedule.ZBV, pp, 2, m), equal(2 * pp))
    assert result.makespan == pytest.approx(6 * m + pp - 1)


@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.GPIPE])
def test_one_micro_batch_pays_every_transfer_there_and_back(schedule):
    result = simulate(build_schedule(schedule, 4, 1, 1), equal(4), p2p_seconds=(0.1, 0.2, 0.4))
    assert result.makespan == pytest.approx(4 * 3 + 2 * 0.7)


def test_a_slow_last_stage_paces_the_step():
    # Stages of 3 and 6 s: rank 1 works 5 * 6 s without a break after the first forward.
    durations = StageDurations(
        forward=(1.0, 2.0), backward_input=(1.0, 2.0), backward_weight=(1.0, 2.0)
    )
    result = simulate(build_schedule(Schedule.ONE_F_ONE_B, 2, 1, 5), durations)
    assert result.makespan == pytest.approx(1 + 30 + 2)


def test_a_send_that_does_not_overlap_holds_its_rank():
    durations = equal(2)
    table = build_schedule(Schedule.GPIPE, 2, 1, 2)
    # Rank 0: F 0-1, F 1-2; rank 1 gets them at 1.5 and 2.5: F, F until 3.5, B until 5.5 and 7.5.
    assert simulate(table, durations, 0.5).makespan == pytest.approx(3.5 + 4 + 0.5 + 2)
    # Held: rank 0 sends until 1.5 and until 3; rank 1 ends its forwards at 4, B until 6, sends
    # until 6.5, B until 8.5, sends until 9; rank 0's last backward takes 2 more.
    held = simulate(table, durations, 0.5, p2p_overlaps=False)
    assert held.makespan == pytest.approx(9 + 2)
    assert held.busy == pytest.approx((6 + 1.0, 6 + 1.0))


def test_transfers_between_stages_of_one_rank_are_free():
    table = build_schedule(Schedule.ZBV, 2, 2, 1)
    # 0 -> 1 and 2 -> 3 cross ranks, the turn 1 -> 2 does not; three weight gradients overlap.
    spans = {str(i.action): i for i in timeline(table, equal(4), (0.5, 100.0, 0.5))}
    assert spans["2F0"].start == pytest.approx(spans["1F0"].end)
    assert spans["3F0"].start == pytest.approx(spans["2F0"].end + 0.5)


def test_timeline_lists_rows_in_order():
    table = build_schedule(Schedule.ONE_F_ONE_B, 2, 1, 2)
    intervals = timeline(table, equal(2))
    assert [(i.rank, str(i.action), i.start, i.end) for i in intervals] == [
        (0, "0F0", 0, 1),
        (0, "0F1", 1, 2),
        (0, "0B0", 4, 6),
        (0, "0B1", 7, 9),
        (1, "1F0", 1, 2),
        (1, "1B0", 2, 4),
        (1, "1F1", 4, 5),
        (1, "1B1", 5, 7),
    ]


def test_a_table_read_from_strings_simulates_like_the_built_one():
    table = build_schedule(Schedule.DUALPIPEV, 3, 2, 8)
    read = table_from_strings(table.shape, table.strings())
    assert simulate(read, equal(6)) == simulate(table, equal(6))


def test_durations_and_transfers_of_the_wrong_length_are_refused():
    table = build_schedule(Schedule.GPIPE, 3, 1, 2)
    with pytest.raises(ValueError, match="durations of 2 stages for a schedule of 3"):
        simulate(table, equal(2))
    with pytest.raises(ValueError, match="3 transfer times for the 2 boundaries of 3 stages"):
        simulate(table, equal(3), (0.1, 0.1, 0.1))
    with pytest.raises(ValueError, match=r"different numbers of stages: \[1, 2\]"):
        StageDurations(forward=(1.0, 1.0), backward_input=(1.0,), backward_weight=(1.0,))


def test_a_deadlocked_table_is_not_simulated():
    shape = build_schedule(Schedule.ONE_F_ONE_B, 2, 1, 2).shape
    rows = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    with pytest.raises(ValueError, match="deadlock: rank 0 waits in step 1"):
        simulate(table_from_strings(shape, rows), equal(2))


def sums_of(shape, durations, transfers, *, slowest):
    stages = range(shape.num_stages)
    whole = [
        durations.forward[s] + durations.backward_input[s] + durations.backward_weight[s]
        for s in stages
    ]
    work, forward = [0.0] * shape.pipeline_parallel, [0.0] * shape.pipeline_parallel
    for s in stages:
        work[shape.rank_of_stage[s]] += whole[s]
        forward[shape.rank_of_stage[s]] += durations.forward[s]
    return PipelineSums(
        forward=np.array(sum(durations.forward)),
        backward_input=np.array(sum(durations.backward_input)),
        backward_weight=np.array(sum(durations.backward_weight)),
        slowest_rank=np.array(max(work) if slowest else 0.0),
        forward_share=np.array(max(f / w for f, w in zip(forward, work, strict=True))),
        smallest_forward=np.array(min(durations.forward)),
        smallest_backward=np.array(
            min(map(sum, zip(durations.backward_input, durations.backward_weight, strict=True)))
        ),
        way=np.array(least_way(shape, transfers)),
        way_ahead=np.array(
            np.mean([sum(transfers[:rank]) for rank in range(shape.pipeline_parallel)])
        ),
        way_round=np.array(
            min(transfers[shape.pipeline_parallel - 1 :: shape.pipeline_parallel], default=0)
        ),
    )


def least_way(shape, transfers):
    """Return the transfers through all ranks of the chunk for which they take least."""
    p = shape.pipeline_parallel
    return min(sum(transfers[c * p : c * p + p - 1]) for c in range(shape.stages_per_rank))


def bound_of(shape, sums):
    numbers = (
        SCHEDULES.index(shape.schedule),
        shape.pipeline_parallel,
        shape.stages_per_rank,
        shape.num_micro_batches,
    )
    return float(makespan_lower_bound(*map(np.array, numbers), sums))


@given(
    problem=problems(max_ranks=6, max_micro_batches=20),
    overlaps=st.booleans(),
    slowest=st.booleans(),
)
@settings(deadline=None, max_examples=300)
def test_no_simulation_beats_the_lower_bound(problem, overlaps, slowest):
    shape, durations, transfers = problem
    makespan = simulate(build(shape), durations, transfers, p2p_overlaps=overlaps).makespan
    bound = bound_of(shape, sums_of(shape, durations, transfers, slowest=slowest))
    assert bound <= makespan * (1 + 1e-12)


@pytest.mark.parametrize(
    ("schedule", "v", "least"),
    [
        (Schedule.GPIPE, 1, 1.0),
        (Schedule.ONE_F_ONE_B, 1, 0.94),
        (Schedule.INTERLEAVED, 4, 0.94),
        (Schedule.ZERO_BUBBLE, 1, 0.92),
        (Schedule.ZBV, 2, 0.97),
        (Schedule.DUALPIPEV, 2, 0.93),
    ],
)
def test_the_bound_of_equal_stages_is_near_the_truth(schedule, v, least):
    # 8 ranks, 32 micro-batches: what the search prunes with at a common size
    shape = build_schedule(schedule, 8, v, 32).shape
    durations = equal(8 * v)
    makespan = simulate(build(shape), durations).makespan
    zero = (0.0,) * (8 * v - 1)
    bound = bound_of(shape, sums_of(shape, durations, zero, slowest=True))
    assert least <= bound / makespan <= 1 + 1e-12


def test_bounds_of_an_array_are_those_of_its_rows():
    shapes = [build_schedule(s, 4, 1 if s in SCHEDULES[:2] else 2, 8).shape for s in Schedule]
    durations = [equal(s.num_stages, 1.0, 2.0, 0.5) for s in shapes]
    sums = [
        sums_of(s, d, (0.1,) * (s.num_stages - 1), slowest=True)
        for s, d in zip(shapes, durations, strict=True)
    ]
    stacked = PipelineSums(
        **{
            name: np.array([float(getattr(one, name)) for one in sums])
            for name in PipelineSums.__dataclass_fields__
        }
    )
    bounds = makespan_lower_bound(
        np.array([SCHEDULES.index(s.schedule) for s in shapes]),
        np.array([s.pipeline_parallel for s in shapes]),
        np.array([s.stages_per_rank for s in shapes]),
        np.array([s.num_micro_batches for s in shapes]),
        stacked,
    )
    expected = [bound_of(s, one) for s, one in zip(shapes, sums, strict=True)]
    assert bounds.tolist() == pytest.approx(expected, rel=1e-14)


def test_actions_of_a_timeline_are_records():
    first = timeline(build_schedule(Schedule.GPIPE, 1, 1, 1), equal(1))[0]
    assert first.action == Action(0, F, 0)
