"""`planner plot`: every input gives its figure, every wrong one a message."""

import json

import pytest

from planner.cli import main

PLAN = "--model 8b --gpus 8 --pp 2 --tp 2 --zero 1 --global-batch-size 16 --seq-len 2048"


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """Plans of 8 and 16 GPUs, made as `estimate` judges them."""
    from argparse import ArgumentParser  # noqa: PLC0415
    from dataclasses import replace  # noqa: PLC0415

    from planner.cli import estimate, flags  # noqa: PLC0415
    from planner.contract import judgement_json  # noqa: PLC0415
    from planner.judge import judge  # noqa: PLC0415
    from planner.plan import Plan, SolverStatus, write_plan  # noqa: PLC0415

    folder = tmp_path_factory.mktemp("plans")
    parser = ArgumentParser()
    estimate.add_arguments(parser)
    paths = []
    for gpus in (8, 16):
        words = parser.parse_args(PLAN.replace("--gpus 8", f"--gpus {gpus}").split())
        model = flags.read_model_flag(words)
        cluster = flags.read_cluster(words, flags.read_hardware_flags(words))
        job = flags.read_job(words, model, cluster.num_gpus)
        layout = flags.read_layout(words, model, job, cluster)
        judgement = judge(model, job, cluster, layout)
        plan = Plan(
            model=model,
            job=job,
            cluster=cluster,
            layout=layout,
            estimate=judgement_json(judgement, model, job, cluster),
            solver=SolverStatus(status="given"),
        )
        paths.append(folder / f"{gpus}.json")
        write_plan(plan, paths[-1])
    unparallel = replace(
        plan, layout=replace(layout, pipeline_parallel=1, layers_per_stage=(32,), data_parallel=8)
    )
    write_plan(unparallel, folder / "no-pipeline.json")
    return folder


def drawn(capsys, *words):
    assert main(["plot", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["figures"]


@pytest.mark.parametrize("kind", ["overview", "time", "memory", "timeline"])
def test_a_plan_gives_each_of_its_figures_with_the_same_bytes_twice(plans, kind, tmp_path, capsys):
    for name in ("one.svg", "two.svg"):
        (figure,) = drawn(capsys, plans / "8.json", "-o", tmp_path / name, "--kind", kind)
        assert figure["file"] == str(tmp_path / name)
        assert figure["title"]
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_the_page_of_a_plan_is_the_default(plans, tmp_path, capsys):
    (page,) = drawn(capsys, plans / "8.json", "-o", tmp_path / "page.png")
    assert page["title"].startswith("Llama-3.1-8B on 8 x h100-sxm-80gb: tp2 pp2 dp2 zero1")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def test_the_time_figure_draws_the_numbers_that_stand_in_the_plan(plans, tmp_path, capsys):
    estimate = json.loads((plans / "8.json").read_text())["estimate"]["time"]
    (figure,) = drawn(capsys, plans / "8.json", "-o", tmp_path / "t.svg", "--kind", "time")
    share = max(term["exposed_seconds"] for term in estimate["terms"]) / estimate["step_seconds"]
    assert f"take {share:.0%} of the" in figure["title"]


def test_a_plan_without_pipeline_has_no_timeline_and_a_page_all_the_same(plans, tmp_path, capsys):
    path = plans / "no-pipeline.json"
    assert main(["plot", str(path), "-o", str(tmp_path / "t.svg"), "--kind", "timeline"]) == 2
    assert "one pipeline stage: there is no timeline" in capsys.readouterr().err
    assert drawn(capsys, path, "-o", tmp_path / "page.svg")


def test_several_plans_and_searches_scale(plans, tmp_path, capsys):
    estimates = [json.loads((plans / f"{n}.json").read_text())["estimate"] for n in (8, 16)]
    search = tmp_path / "search.json"
    search.write_text(json.dumps({"schema": 1, "plans": estimates}), encoding="utf-8")
    (one,) = drawn(capsys, search, "-o", tmp_path / "a.svg")
    (other,) = drawn(capsys, plans / "8.json", plans / "16.json", "-o", tmp_path / "b.svg")
    assert one["title"] == other["title"]
    assert one["title"].startswith("From 8 to 16 GPUs each GPU ")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_run_folders_compare_predicted_with_measured(plans, tmp_path, capsys):
    plan = json.loads((plans / "8.json").read_text())
    seconds = plan["estimate"]["time"]["step_seconds"]
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "plan.json").write_text((plans / "8.json").read_text(), encoding="utf-8")
    lines = [json.dumps({"step": i, "step_seconds": 2 * seconds}) for i in range(5)]
    (folder / "measured.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (figure,) = drawn(capsys, folder, "-o", tmp_path / "runs.svg")
    assert figure["title"].endswith("-50%")


def predicted_table(path, *gpus):
    from planner.measured.validate import PREDICTED, REQUIRED  # noqa: PLC0415

    columns = [*REQUIRED, "family", "status", "core", "tokens_per_sec_per_gpu", *PREDICTED]
    lines = [",".join(columns)]
    for gpu in gpus:
        known = {
            "gpu": gpu,
            "family": "f",
            "status": "ok",
            "core": "1",
            "tokens_per_sec_per_gpu": "100",
            "predicted_tokens_per_second_per_gpu": "110",
        }
        lines.append(",".join(known.get(column, "") for column in columns))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_table_gives_one_figure_per_generation(tmp_path, capsys):
    table = predicted_table(tmp_path / "t.csv", "H100-SXM-80GB", "A100-SXM-80GB", "H200-SXM-141GB")
    figures = drawn(capsys, table, "-o", tmp_path / "fig.svg")
    assert [figure["file"] for figure in figures] == [
        str(tmp_path / "fig-ampere.svg"),
        str(tmp_path / "fig-hopper.svg"),
    ]
    assert figures[1]["title"].startswith("Hopper: 2 runs of 1 family is predicted 10% off")


def test_a_table_of_one_generation_goes_to_the_file_itself(tmp_path, capsys):
    table = predicted_table(tmp_path / "t.csv", "H100-SXM-80GB")
    (figure,) = drawn(capsys, table, "-o", tmp_path / "fig.svg")
    assert figure["file"] == str(tmp_path / "fig.svg")


def refused(capsys, *words):
    assert main(["plot", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_wrong_inputs_are_refused_in_one_line(plans, tmp_path, capsys):
    plan, figure = plans / "8.json", tmp_path / "f.svg"
    empty = tmp_path / "empty.csv"
    empty.write_text("a,b\n1,2\n", encoding="utf-8")
    nothing = predicted_table(tmp_path / "nothing.csv")
    search = tmp_path / "search.json"
    search.write_text('{"plans": []}', encoding="utf-8")
    assert "its suffix must be one of .svg, .png, .pdf" in refused(capsys, plan, "-o", "f.gif")
    assert "cannot read" in refused(capsys, tmp_path / "absent.json", "-o", figure)
    assert "--kind memory does not go with searches" in refused(
        capsys, plan, plan, "-o", figure, "--kind", "memory"
    )
    assert "--kind scaling does not go with run folders" in refused(
        capsys, tmp_path, "-o", figure, "--kind", "scaling"
    )
    assert "run folders and files cannot share a figure" in refused(
        capsys, plan, tmp_path, "-o", figure
    )
    assert "lacks the column" in refused(capsys, empty, "-o", figure)
    assert "no row with a measured" in refused(capsys, nothing, "-o", figure)
    assert "found no plan to draw" in refused(capsys, search, "-o", figure)
    assert "cannot write" in refused(capsys, plan, "-o", tmp_path / "no" / "f.svg")
    assert not figure.exists()


def test_an_estimate_that_was_tampered_with_is_refused(plans, tmp_path, capsys):
    plan = json.loads((plans / "8.json").read_text())
    path = tmp_path / "plan.json"
    for terms, message in (
        (None, "holds no estimate of time"),
        ([{"name": "matmul"}], "estimate is not valid"),
        ([], "its terms sum to no time"),
    ):
        plan["estimate"]["time"]["terms"] = terms
        path.write_text(json.dumps(plan), encoding="utf-8")
        assert message in refused(capsys, path, "-o", tmp_path / "f.svg")


def test_a_plan_of_another_version_that_lacks_a_constant_is_refused(plans, tmp_path, capsys):
    plan = json.loads((plans / "8.json").read_text())
    plan["cluster"]["profile"]["calibration"]["constants"] = []
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan), encoding="utf-8")
    message = refused(capsys, path, "-o", tmp_path / "f.svg", "--kind", "timeline")
    assert "has no constant" in message
    assert "make it anew" in message
