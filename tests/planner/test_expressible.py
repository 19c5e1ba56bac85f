"""What the search offers for a target, `apply` can write for it."""

import random
from dataclasses import replace

import pytest

from costmodels.job import Target, TrainingJob
from costmodels.layout import split_layers
from costmodels.layout_table import table_of
from costmodels.model import ModelSpec
from costmodels.profile_toml import make_cluster, read_profile
from planner.cli import main
from planner.constraints import FREE, Constraints, applicable
from planner.emit import EMITTERS, CannotExpress, emit
from planner.presets import read_model
from planner.rules import Case
from planner.rules.expressible import expressible_rules
from planner.rules.own_splits import nanotron_split, own_splits
from planner.search.ranking import search
from planner.search.space import legal_table, space_of

H100 = read_profile("h100-sxm-80gb")
FOREIGN = [target for target in Target if target is not Target.NATIVE]


def shrunk(name: str) -> ModelSpec:
    """A preset with a few layers, so that its space is small."""
    return replace(read_model(name), num_layers=8)


class Inputs:
    """The inputs of a plan, as `emit` takes them."""

    def __init__(self, model, job, cluster, layout):
        self.model, self.job, self.cluster, self.layout = model, job, cluster, layout


def refuses(target, model, job, cluster, layout) -> bool:
    try:
        EMITTERS[target](model, job, cluster, layout)
    except CannotExpress:
        return True
    return False


@pytest.mark.parametrize("gpus", [8, 16])
@pytest.mark.parametrize("target", FOREIGN)
def test_the_rules_refuse_what_the_emitter_refuses_and_nothing_else(target, gpus):
    """On 300 random layouts that the target's table allows, all layers recomputed or none."""
    model = read_model("8b")
    if target is not Target.TORCHTITAN:  # which knows the shapes of its registry only
        model = replace(model, num_layers=8, vocab_size=32000)
    job = TrainingJob(seq_len=4096, global_batch_size=16, target=target)
    cluster = make_cluster(H100, gpus)
    table = legal_table(space_of(model, job, cluster, FREE))
    rng = random.Random(gpus)  # noqa: S311 - layouts, not secrets
    rows = sorted(rng.sample(range(len(table)), min(300, len(table))))
    refused = 0
    for row in rows:
        stages = int(table.pipeline_parallel[row] * table.stages_per_rank[row])
        split = split_layers(model.num_layers, stages)
        if target is Target.NANOTRON:
            split = nanotron_split(model, stages)
        layout = table.layout(row, split, 0)
        case = Case(model=model, job=job, cluster=cluster, table=table_of([layout]))
        obeys = all(rule.holds(case)[0] for rule in expressible_rules(target))
        assert obeys is not refuses(target, model, job, cluster, layout), layout
        refused += not obeys
    assert refused < len(rows)
    assert refused or gpus == 8  # on one node every rank order is the usual one


@pytest.mark.parametrize("target", list(Target))
@pytest.mark.parametrize("tight", [False, True])
def test_every_plan_of_a_search_is_written(target, tight):
    model = read_model("8b") if target is Target.TORCHTITAN else shrunk("7b")
    memory = ("device.memory_gib=24",) if tight and target is not Target.TORCHTITAN else ()
    cluster = make_cluster(read_profile("h100-sxm-80gb", memory), 8)
    job = TrainingJob(seq_len=4096, global_batch_size=64, target=target)
    constraints = applicable(FREE, target, model)
    found = search(model, job, cluster, constraints, top=8)
    assert len(found.plans) >= (1 if tight else 3)
    for plan in found.plans:
        if target is not Target.NATIVE:
            assert emit(Inputs(model, job, cluster, plan.layout), target).files


def test_nanotron_is_offered_its_own_split():
    model = replace(read_model("7b"), num_layers=30)
    job = TrainingJob(seq_len=4096, global_batch_size=64, target=Target.NANOTRON)
    cluster = make_cluster(H100, 8)
    piped = Constraints(pipeline_parallel=(4,))
    found = search(model, job, cluster, applicable(piped, Target.NANOTRON, model), top=2)
    assert {plan.layout.layers_per_stage for plan in found.plans} == {nanotron_split(model, 4)}


def test_splits_of_nanotron_have_no_empty_stage():
    model = read_model("8b")  # its head weighs as much as 2.3 layers
    splits = own_splits(Target.NANOTRON, model)
    assert all(min(split) > 0 and sum(split) == model.num_layers for split in splits)
    assert 0 in nanotron_split(model, 32)


def test_a_searched_plan_is_applied_from_its_file(tmp_path, capsys):
    plan = tmp_path / "plan.json"
    asked = ["--model", "7b", "--gpus", "8", "--target", "deepspeed", "--global-batch-size", "64"]
    assert main(["search", *asked, "--top", "1", "-o", str(plan)]) == 0
    assert main(["apply", str(plan)]) == 0
    assert "ds_config.json" in capsys.readouterr().out
