"""Input that nobody means: huge numbers, devices, splits of another model, tampered plans."""

import json
import os

import pytest

from costmodels.config_keys import MAX_COUNT
from planner.cli import main
from planner.cli.flags import default_batch

ESTIMATE = ["estimate", "--model", "8b", "--gpus", "8", "--json"]
SEARCH = ["search", "--model", "8b", "--gpus", "8", "--json"]
HUGE = "9" * 30


def answered(capsys, words):
    """Run a verb; return its exit status, stdout and stderr."""
    try:
        status = main(words)
    except SystemExit as end:
        status = end.code
    streams = capsys.readouterr()
    return status, streams.out, streams.err


@pytest.mark.parametrize("verb", [ESTIMATE, SEARCH])
@pytest.mark.parametrize(
    "flag", ["--seq-len", "--global-batch-size", "--mbs", "--tp", "--pp", "--vpp", "--lora-rank"]
)
def test_numbers_that_no_table_holds_are_refused_by_the_flag(capsys, verb, flag):
    status, out, err = answered(capsys, [*verb, flag, HUGE])
    assert (status, out) == (2, "")
    assert flag in err
    assert str(MAX_COUNT) in err


@pytest.mark.parametrize("flag", ["--pp", "--vpp"])
def test_more_stages_than_can_be_listed_are_refused_at_once(capsys, flag):
    status, out, err = answered(capsys, [*ESTIMATE, flag, str(MAX_COUNT)])
    assert status == 2
    assert json.loads(out).keys() == {"error"}
    assert f"{MAX_COUNT} stages of 32 layers" in err


def test_memory_taken_beyond_any_card_is_refused(capsys):
    status, out, err = answered(capsys, [*ESTIMATE, "--memory-taken-gib", "1e300"])
    assert (status, out) == (2, "")
    assert "between 0 and" in err


def test_micro_batches_whose_product_overflows_are_illegal(capsys):
    words = [*ESTIMATE, "--global-batch-size", "512", "--mbs", str(MAX_COUNT)]
    status, out, _ = answered(capsys, words)
    assert status == 1
    broken = json.loads(out)["violations"]
    assert broken[0]["given"] == {"global_batch_size": 8 * MAX_COUNT}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--layers-per-stage", "16,15"], "sums to 31 layers, but Llama-3.1-8B has 32"),
        (["--recompute-layers", "99"], "99 is more than the 32 layers"),
    ],
)
def test_search_refuses_splits_that_suit_no_layout(capsys, flags, says):
    status, _, err = answered(capsys, [*SEARCH, *flags])
    assert status == 2
    assert says in err


def test_recompute_layers_beyond_a_stage_are_never_listed(capsys):
    words = ["search", "--model", "tiny", "--hardware", "cpu-gloo", "--gpus", "2", "--json"]
    given = ["--recompute", "full", "--recompute-layers", "2", "--pp", "1,2"]
    status, out, _ = answered(capsys, [*words, *given])
    plans = json.loads(out)["plans"]
    assert status == 0
    assert plans
    assert all(max(plan["layout"]["layers_per_stage"]) >= 2 for plan in plans)


def test_too_many_recomputed_layers_are_told_how_many_are_legal(capsys):
    words = [*ESTIMATE, "--recompute", "full", "--recompute-layers", "99"]
    status, out, _ = answered(capsys, words)
    (broken,) = json.loads(out)["violations"]
    assert status == 1
    assert broken["allowed"]["recompute_layers"] == list(range(1, 33))


def test_a_range_of_gpus_ends_at_the_largest_clusters(capsys):
    status, _, err = answered(capsys, ["search", "--model", "1b", "--gpus", "1..999999999"])
    assert status == 2
    assert "131072" in err


def test_endless_and_silent_files_are_refused_at_once(capsys, tmp_path):
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    for words in (
        [*ESTIMATE, "--hardware", "/dev/zero"],
        [*ESTIMATE, "--hardware", str(pipe)],
        ["explain", "/dev/zero", "--json"],
    ):
        status, out, err = answered(capsys, words)
        assert status == 2
        assert json.loads(out).keys() == {"error"}
        assert words[-1] in err or "/dev/zero" in err


def test_a_default_batch_too_small_for_the_gpus_is_the_nearest_legal_one():
    tokens = 131072  # 4 M tokens are 32 sequences: fewer than half of 1024 GPUs
    assert default_batch(tokens, 1024) == 32
    assert default_batch(tokens, 1024, per_forward=128) == 128
    assert default_batch(tokens, 1024, per_forward=12) == 36


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    words = ["search", "--model", "tiny", "--hardware", "cpu-gloo", "--gpus", "2", "--dp", "2"]
    assert main([*words, "-o", str(path)]) == 0
    return json.loads(path.read_text())


@pytest.mark.parametrize("verb", ["apply", "explain"])
@pytest.mark.parametrize(
    "edit",
    [
        ("layout", "data_parallel", 10**30),
        ("layout", "data_parallel", MAX_COUNT + 1),
        ("layout", "rank_order", ["tp", "cp", "dp", "evil"]),
        ("layout", "rank_order", []),
        ("model", "hidden_size", 10**30),
        ("model", "head_dim", 2**40),
        ("model", "rope_theta", 0.0),
        ("model", "rope_fraction", -3.0),
        ("model", "norm_epsilon", -1.0),
        ("cluster", "num_gpus", 10**30),
        ("cluster", "num_gpus", 2**40),
        ("job", "memory_taken", -(10**15)),
        ("job", "lora_rank", 0),
        ("job", "switches", {"attention_kernel": "$(id)"}),
        ("model", "name", "tiny\nfits"),
        ("solver", "status", "proved"),
        ("solver", "num_layouts", -1),
    ],
)
def test_a_tampered_plan_gives_one_message(capsys, tmp_path, plan, verb, edit):
    record, key, value = edit
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan | {record: plan[record] | {key: value}}))
    status, out, err = answered(capsys, [verb, str(path), "--json"])
    assert status in (1, 2)
    assert key in err or key in out


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "override",
    [
        "constants.gemm_efficiency=0",
        "constants.host_launch=1e300",
        "device.memory_gb_per_s=1e-320",
    ],
)
def test_figures_that_give_no_finite_step_are_refused(capsys, override):
    status, out, err = answered(capsys, [*ESTIMATE, "--zero", "3", "--set", override])
    assert status == 2
    assert json.loads(out).keys() == {"error"}
    assert "must be" in err or "beyond any machine" in err


def test_estimate_places_ranks_as_search_does(capsys):
    # On a slow network a pipeline belongs inside the node: the gradients are few, the hops many.
    inputs = ["--model", "1b", "--gpus", "16", "--json", "--pp", "4", "--global-batch-size", "2048"]
    inputs += ["--set", "links.inter_node.gb_per_s=1"]
    usual = json.loads(answered(capsys, ["estimate", *inputs, "--rank-order", "tp,cp,dp,pp"])[1])
    best = json.loads(answered(capsys, ["estimate", *inputs])[1])
    assert best["layout"]["rank_order"] == ["tp", "cp", "pp", "dp"]
    assert best["time"]["step_seconds"] < usual["time"]["step_seconds"]
    assert {**best["layout"], "rank_order": usual["layout"]["rank_order"]} == usual["layout"]


def test_a_rank_order_that_lacks_an_axis_is_refused(capsys):
    status, _, err = answered(capsys, [*ESTIMATE, "--rank-order", "tp,tp,dp,pp"])
    assert status == 2
    assert "each of tp, cp, dp, pp once" in err


@pytest.mark.parametrize(
    "flags",
    [
        ["--why-not", "zero=1", "--what-if", "gpus=4"],
        ["--why-not", "zero=1", "--formulas"],
        ["--what-if", "gpus=4", "--tokens", "1T"],
        ["--dollars-per-gpu-hour", "2"],
        ["--why-not", ""],
        ["--what-if", ""],
    ],
)
def test_explain_ignores_no_flag(capsys, tmp_path, plan, flags):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    status, out, err = answered(capsys, ["explain", str(path), *flags])
    assert (status, out) == (2, "")
    assert flags[0] in err


def test_no_proof_is_claimed_of_a_plan_that_was_edited(capsys, tmp_path, plan):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    assert "optimal: none of" in answered(capsys, ["explain", str(path)])[1]
    edited = plan["layout"] | {"recompute": "full", "recompute_layers": 0}
    path.write_text(json.dumps(plan | {"layout": edited}))
    _, out, _ = answered(capsys, ["explain", str(path)])
    assert "optimal: none of" not in out
    assert "nothing is proved" in out


def test_what_if_reports_the_changed_machine(capsys, tmp_path, plan):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    _, out, _ = answered(capsys, ["explain", str(path), "--what-if", "gpus=4", "--json"])
    found = json.loads(out)
    counts = [found[name]["hardware"]["gpus"] for name in ("before", "after", "best")]
    assert counts == [2, 4, 4]
