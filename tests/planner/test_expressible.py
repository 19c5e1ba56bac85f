"""What the search offers for a target, `apply` can write for it."""

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest

from costmodels.hardware import Cluster
from costmodels.job import Optimizer, Precision, Switches, Target, TrainingJob
from costmodels.layout import Layout, split_layers
from costmodels.model import ModelSpec
from costmodels.profiles.reader import make_cluster, read_profile
from planner.cli import main
from planner.constraints import FREE, Constraints, applicable
from planner.emit import CannotExpress, IllegalPlanError, emit
from planner.plan import Plan, SolverStatus
from planner.presets import read_model
from planner.rules import Case
from planner.rules.expressible import expressible_rules
from planner.rules.own_splits import nanotron_split, own_splits
from planner.search.ranking import search
from planner.search.space import legal_table, space_of

H100 = read_profile("h100-sxm-80gb")


def shrunk(name: str) -> ModelSpec:
    """A preset with a few layers, so that its space is small."""
    return replace(read_model(name), num_layers=8)


@dataclass(frozen=True)
class World:
    """A job whose legal layouts are judged by the rules and by the emitter."""

    model: ModelSpec
    job: TrainingJob
    cluster: Cluster

    def split_of(self, stages: int) -> tuple[int, ...]:
        if self.job.target is Target.NANOTRON:
            return nanotron_split(self.model, stages)
        return split_layers(self.model.num_layers, stages)

    def layout(self, table, row: int) -> Layout:
        """A row with all layers recomputed or none."""
        stages = int(table.pipeline_parallel[row] * table.stages_per_rank[row])
        return table.layout(row, self.split_of(stages), 0)

    def plan(self, layout: Layout) -> Plan:
        return Plan(
            model=self.model,
            job=self.job,
            cluster=self.cluster,
            layout=layout,
            estimate={},
            solver=SolverStatus(status="given"),
        )


GRAPHS = Switches(cuda_graphs=True)
# What each target is asked about besides a dense model on one node and on two: the model, GPUs, and
# what the job says.
ASKED = {
    Target.NATIVE: (("mixtral-8x7b", 8, {"flash_attention": False}),),
    Target.MEGATRON: (
        ("mixtral-8x7b", 8, {"precision": Precision.FP16}),
        ("7b", 8, {"optimizer": Optimizer.ADAMW_8BIT}),
        ("7b", 8, {"switches": GRAPHS}),
    ),
    Target.TORCHTITAN: (("qwen3-8b", 8, {}),),
    Target.DEEPSPEED: (("mixtral-8x7b", 8, {}),),
    Target.NANOTRON: (("mixtral-8x7b", 8, {}),),
    Target.ACCELERATE: (("mixtral-8x7b", 8, {}),),
}
CASES = [
    (target, *case)
    for target, asked in ASKED.items()
    for case in (("8b", 8, {}), ("8b", 16, {}), *asked)
]
# nanotron's configuration has no experts at all, so that its emitter refuses the model itself.
WRITTEN = [case for case in CASES if case[:2] != (Target.NANOTRON, "mixtral-8x7b")]


def world(target, name, gpus, says) -> World:
    # torchtitan knows the shapes of its registry only.
    model = read_model(name) if target is Target.TORCHTITAN else shrunk(name)
    job = TrainingJob(seq_len=4096, global_batch_size=16, target=target, **says)
    return World(model, job, make_cluster(H100, gpus))


def refused_rows(asked: World, table):
    """Rows that each rule of the target's table refuses, by its name."""
    case = Case(model=asked.model, job=asked.job, cluster=asked.cluster, table=table)
    rules = expressible_rules(asked.job.target)
    return {rule.name: ~rule.holds(case) for rule in rules}


def legal(asked: World):
    """Legal layouts but for those on which nanotron's own split leaves a stage empty."""
    table = legal_table(space_of(asked.model, asked.job, asked.cluster, FREE))
    stages = table.pipeline_parallel * table.stages_per_rank
    filled = [n for n in np.unique(stages).tolist() if min(asked.split_of(n)) > 0]
    return table.take(np.isin(stages, filled))


def is_refused(asked: World, layout: Layout) -> bool:
    try:
        emit(asked.plan(layout), asked.job.target)
    except (CannotExpress, IllegalPlanError):
        return True
    return False


@pytest.mark.parametrize(("target", "name", "gpus", "says"), WRITTEN)
def test_the_rules_refuse_what_the_emitter_refuses_and_nothing_else(target, name, gpus, says):
    """On layouts that the target's table allows: of each rule some that it alone refuses, if it
    refuses any, and of all layouts and of those that no rule refuses 100 each.
    """
    asked = world(target, name, gpus, says)
    table = legal(asked)
    by_rule = refused_rows(asked, table)
    times = np.sum(list(by_rule.values()), axis=0)
    kinds = [np.arange(len(table)), np.flatnonzero(times == 0)]
    for refused in by_rule.values():
        alone = np.flatnonzero(refused & (times == 1))
        kinds.append(alone if len(alone) else np.flatnonzero(refused))
    rng = random.Random(gpus)  # noqa: S311 - layouts, not secrets
    most = (100, 100, *(20 for _ in by_rule))
    rows = {
        row
        for kind, number in zip(kinds, most, strict=True)
        for row in rng.sample(kind.tolist(), min(number, len(kind)))
    }
    for row in sorted(rows):
        layout = asked.layout(table, row)
        assert is_refused(asked, layout) is bool(times[row]), layout


@pytest.mark.parametrize("target", list(Target))
def test_every_rule_refuses_a_layout_of_some_case(target):
    refuse = set()
    for case in (case for case in CASES if case[0] is target):
        asked = world(*case)
        found = refused_rows(asked, legal(asked))
        refuse |= {name for name, rows in found.items() if rows.any()}
    assert refuse == {rule.name for rule in expressible_rules(target)}


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
        assert emit(World(model, job, cluster).plan(plan.layout), target).files


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
    assert main(["search", *asked, "-o", str(plan)]) == 0
    assert main(["apply", str(plan)]) == 0
    assert "ds_config.json" in capsys.readouterr().out
