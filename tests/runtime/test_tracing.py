"""trace.json: every rank's actions, its transfers, what hides them, and what was predicted."""

import json
from dataclasses import asdict
from itertools import groupby

import lowering_models as small
import pytest
import torch

from costmodels.hardware import make_cluster
from costmodels.job import Precision, TrainingJob
from costmodels.layout import Layout
from costmodels.model import ModelSpec
from costmodels.profiles.reader import read_profile
from costmodels.time.estimate import estimate_time
from planner.plan import Plan, SolverStatus
from runtime.communication.grid import coordinates
from runtime.communication.pending import Pending
from runtime.executor import Executor
from runtime.launch import run_ranks
from runtime.lower import program_of
from runtime.states.initialise import normal_initialiser
from runtime.states.optimizer import OptimizerSettings, ShardedOptimizer, precisions
from runtime.states.zero import ShardedStates
from runtime.tracing.events import Trace, observed
from runtime.tracing.file import hand_over, handed_over, write_trace
from runtime.tracing.predicted import predicted_actions

MODEL = ModelSpec(
    name="small",
    architecture="llama",
    hidden_size=32,
    num_layers=4,
    num_attention_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_hidden_size=64,
    vocab_size=256,
    training_seq_len=32,
)
LAYOUT = Layout(
    data_parallel=2,
    pipeline_parallel=2,
    zero_stage=1,
    zero_group=2,
    num_micro_batches=4,
    layers_per_stage=(2, 2),
)
STEP = 2  # the third: the first ones connect and allocate


def plan_of(layout):
    return Plan(
        model=MODEL,
        job=TrainingJob(seq_len=32, global_batch_size=8, precision=Precision.FP32),
        cluster=make_cluster(read_profile("cpu-gloo"), 4),
        layout=layout,
        estimate={},
        solver=SolverStatus(status="given"),
    )


def traced_run(folder):
    """Run a step that is traced, on four ranks, and return the trace."""
    plan = plan_of(LAYOUT)
    lowered = small.lowered(MODEL, plan.job, LAYOUT)
    predicted = predicted_actions(plan)

    def train(world):
        trace = Trace(world.device, first_step=STEP)
        mesh = observed(world.mesh(LAYOUT), trace)
        program = program_of(lowered, LAYOUT, mesh)
        values = normal_initialiser(0, MODEL.num_layers, world.device)
        states = ShardedStates(program, mesh, precisions(plan.job), initialise=values)
        executor = Executor(program, mesh, states, trace=trace)
        tokens = torch.zeros((1, 32), dtype=torch.long)
        for step in range(STEP + 2):
            trace.begin_step(step)
            executor.run([{"input_ids": tokens, "labels": tokens}] * 4)
            states.clear_gradients()
            trace.end_step()
        hand_over(world.store, world.rank, trace.events())
        if world.rank == 0:
            ranks = handed_over(world.store, world.size)
            places = {rank: coordinates(LAYOUT, rank)["pp"] for rank in range(world.size)}
            write_trace(folder, ((rank, e, predicted[places[rank]]) for rank, e in ranks))
        return []

    run_ranks(train, 4, timeout=240)
    assert [path.name for path in folder.iterdir()] == ["trace.json"]
    return json.loads((folder / "trace.json").read_text())["traceEvents"]


def spans(events, rank, category, track=1):
    return [
        event
        for event in events
        if event["ph"] == "X"
        and (event["pid"], event["tid"], event["cat"]) == (rank, track, category)
    ]


def transfers(events, rank):
    """Return (name, start, end, bytes) of a rank's transfers."""
    begun = {e["id"]: e for e in events if e["ph"] == "b" and e["pid"] == rank}
    ended = {e["id"]: e for e in events if e["ph"] == "e" and e["pid"] == rank}
    assert begun.keys() == ended.keys()
    return [
        (begun[key]["name"], begun[key]["ts"], ended[key]["ts"], begun[key]["args"]["bytes"])
        for key in begun
    ]


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    return traced_run(tmp_path_factory.mktemp("run"))


def test_every_ranks_actions_are_there_within_its_step(events):
    for rank in range(4):
        (step,) = spans(events, rank, "step")
        assert step["name"] == f"step {STEP}"
        actions = spans(events, rank, "action")
        stage = min(a["name"][0] for a in actions)
        computed = [
            a["name"] for a in actions if "SEND" not in a["name"] and "RECV" not in a["name"]
        ]
        assert sorted(computed) == sorted(f"{stage}{kind}{m}" for kind in "FB" for m in range(4))
        assert {a["name"][0] for a in actions} == {stage}
        for action in actions:
            assert step["ts"] <= action["ts"]
            assert action["ts"] + action["dur"] <= step["ts"] + step["dur"]


def test_transfers_name_their_axis_and_bytes(events):
    for rank in range(4):
        names = [name for name, *_ in transfers(events, rank)]
        assert names.count("pp send") == names.count("pp receive") == 4
        sizes = {size for name, _, _, size in transfers(events, rank) if name == "pp send"}
        assert sizes == {1 * 32 * 32 * 4}  # a micro-batch of one sequence, fp32
        assert any(name.endswith("reduce_scatter") for name in names)


def test_a_transfer_shows_beside_the_action_that_hides_it(events):
    hidden = 0
    for rank in range(4):
        for _, start, end, _ in transfers(events, rank):
            for action in spans(events, rank, "action"):
                inside = start < action["ts"] and action["ts"] + action["dur"] < end
                hidden += inside and action["name"][1] in "FB"
    assert hidden > 0


def gathers_of_a_step(world, layout):
    """Return the events of two steps under ZeRO-1, on this rank, among them when each unit ran."""
    job = plan_of(layout).job
    trace = Trace(world.device, first_step=STEP, num_steps=2)
    mesh = observed(world.mesh(layout), trace)
    program = program_of(small.lowered(MODEL, job, layout), layout, mesh)
    values = normal_initialiser(0, MODEL.num_layers, world.device)
    states = ShardedStates(program, mesh, precisions(job), initialise=values, bucket_bytes=0)
    executor = Executor(program, mesh, states, trace=trace)
    for unit in program.stages[0].units:
        unit.register_forward_hook(
            lambda *_: trace.add("ran", "unit", "", 0, (trace.mark(), trace.mark()))
        )
    optimizer = ShardedOptimizer(states, OptimizerSettings())
    tokens = torch.zeros((1, 32), dtype=torch.long)
    for step in range(STEP + 2):
        trace.begin_step(step)
        executor.run([{"input_ids": tokens, "labels": tokens}] * layout.num_micro_batches)
        optimizer.step(step)
        trace.end_step()
    states.wait_weights()
    return [len(states.buckets), [asdict(event) for event in trace.events()]]


def test_weights_that_zero_1_gathers_travel_behind_the_next_steps_first_forward():
    layout = Layout(
        data_parallel=2,
        zero_stage=1,
        zero_group=2,
        num_micro_batches=2,
        layers_per_stage=(4,),
    )
    num_units = MODEL.num_layers + 2  # the embedding and the head too
    for num_buckets, events in run_ranks(lambda w: gathers_of_a_step(w, layout), 2, timeout=240):
        ended = {e["name"]: e["start"] + e["seconds"] for e in events if e["kind"] == "step"}
        forward = [e for e in events if e["name"] == "0F0"][1]
        inside = [
            e
            for e in events
            if e["name"] in {"ran", "wait all_gather"}
            and forward["start"] < e["start"] < forward["start"] + forward["seconds"]
        ]
        gathers = [e for e in events if (e["name"], e["kind"]) == ("all_gather", "transfer")]
        waits = [e for e in inside if e["kind"] == "wait"]
        # Of the two steps that are traced, the first one's.
        for gather, wait in zip(gathers[:num_buckets], waits, strict=True):
            assert gather["start"] < ended[f"step {STEP}"] < wait["start"]
        # A unit waits when it is its turn, for its own weights: the units before it have run.
        turns = [kind for kind, _ in groupby(event["kind"] for event in inside)]
        assert turns == ["wait", "unit"] * num_units


def test_predictions_stand_on_a_track_of_their_own(events):
    for rank in range(4):
        (step,) = spans(events, rank, "step")
        predicted = spans(events, rank, "predicted", track=2)
        measured = {a["name"] for a in spans(events, rank, "action")}
        assert len(predicted) == 8
        assert {p["name"] for p in predicted} <= measured
        assert min(p["ts"] for p in predicted) >= step["ts"]


def test_predictions_end_where_the_estimates_pipeline_does():
    """The estimate's step is its pipeline, what ranks do once, and a constant."""
    given = plan_of(LAYOUT)
    time = estimate_time(given.model, given.job, given.cluster, LAYOUT)
    once = {"grad_reduce", "param_gather", "optimizer", "step_overhead", "stragglers"}
    pipeline = sum(term.exposed_seconds for term in time.terms if term.name not in once)
    actions = [action for row in predicted_actions(given).values() for action in row]
    assert min(action.start for action in actions) == 0
    assert max(action.end for action in actions) == pytest.approx(pipeline, rel=1e-9)


def test_waits_are_part_of_their_transfer():
    trace = Trace(torch.device("cpu"))
    trace.begin_step(0)
    pending = Pending((), torch.zeros(1)).watched_by(trace.transfer("all_reduce", "dp", 4))
    pending.wait()
    pending.wait()  # somebody asks again: nothing is waited for any more
    trace.end_step()
    transfer, wait, step = trace.events()
    assert (transfer.name, wait.name, step.name) == ("all_reduce", "wait all_reduce", "step 0")
    assert transfer.start <= wait.start
    assert wait.start + wait.seconds == pytest.approx(transfer.start + transfer.seconds)
    assert trace.transfer("send", "pp", 1) is None


def test_a_trace_that_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="cannot write"):
        write_trace(tmp_path / "nowhere", [])

    def broken():
        yield 0, [], []
        raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match="No space left"):
        write_trace(tmp_path, broken())
    assert list(tmp_path.iterdir()) == []
