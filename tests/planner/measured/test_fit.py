"""The fit finds constants that made the data, keeps to bounds, and leaves groups out honestly."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planner.measured import fit, fit_loss, robust_step
from planner.measured.fit_parameters import Parameter, fitted_parameters
from planner.measured.robust_step import PULL, solve
from planner.measured.validate import read_rows

GOLDEN = Path(__file__).parents[2] / "golden" / "measured_runs.csv"


@pytest.fixture(scope="module")
def samples():
    rows = [
        row
        for row in read_rows(GOLDEN)
        if row["gpu"] == "A100-SXM-80GB" and row["recompute"] and row["pp"] == "1"
    ]
    found = fit.read_samples(rows[:: max(1, len(rows) // 12)])
    assert len(found) >= 5
    return found


@pytest.fixture(scope="module")
def parameters(samples):
    wanted = {"gemm_efficiency", "memory_efficiency"}
    every = fitted_parameters(["ampere"], own_machine=True)
    found = tuple(p for p in every if p.generation == "ampere" and p.name in wanted)
    assert [p.name for p in found] == ["gemm_efficiency", "memory_efficiency"]
    return found


def test_fitted_parameters_lie_within_their_bounds():
    for parameter in fitted_parameters(["ampere", "hopper", "blackwell"]):
        assert parameter.low <= parameter.value <= parameter.high, parameter
        assert parameter.low < parameter.middle < parameter.high


def test_a_generation_with_its_own_value_does_not_hear_the_common_one():
    names = {(p.generation, p.name) for p in fitted_parameters(["ampere"])}
    assert ("ampere", "memory_efficiency") in names
    assert ("common", "memory_efficiency") not in names
    assert ("common", "k_fill") in names
    several = {(p.generation, p.name) for p in fitted_parameters(["ampere", "volta"])}
    assert {("ampere", "memory_efficiency"), ("common", "memory_efficiency")} <= several


def test_what_a_generation_chose_by_hand_moves_with_the_runs_of_one_machine_only():
    by_hand = {("ampere", "gemm_efficiency"), ("ampere", "tail_share")}
    fitted, own = (
        {(p.generation, p.name) for p in fitted_parameters(["ampere"], own_machine=own)}
        for own in (False, True)
    )
    assert own - fitted == by_hand
    assert fitted < own


@pytest.fixture(scope="module")
def truth(parameters):
    return np.log([p.value for p in parameters]) + np.array([-0.08, 0.05])


@pytest.fixture(scope="module")
def made(samples, parameters, truth):
    return [
        replace(s, rate=fit.estimate_with(s, parameters, truth).tokens_per_second_per_gpu)
        for s in samples
    ]


def test_without_a_pull_the_fit_recovers_the_constants_that_made_the_data(
    made, parameters, truth, monkeypatch
):
    monkeypatch.setattr(robust_step, "PULL", 0.0)
    found = fit.fit_constants(made, parameters, rounds=3)
    assert found.logs == pytest.approx(truth, abs=1e-5)


def test_the_fit_misses_the_constants_that_made_the_data_by_its_pull_alone(made, parameters, truth):
    found = fit.fit_constants(made, parameters, rounds=3)
    # Where runs ask for nothing more: curvature * (found - truth) = pull * (middle - found). Left
    # is what the errors bend between truth and found, which grows with the square of the way.
    weighted = fit.family_weights(made)[:, None] * found.slopes
    pull = PULL / len(parameters) / np.array([p.width for p in parameters]) ** 2
    middle = np.log([p.middle for p in parameters])
    curvature = found.slopes.T @ weighted + np.diag(pull)
    by_pull = np.linalg.solve(curvature, pull * (middle - truth))
    bend = 0.07 * float(np.abs(by_pull).max()) ** 2
    assert found.logs - truth == pytest.approx(by_pull, abs=bend)
    predicted = np.abs(np.expm1(found.errors))
    before = fit.fit_constants(made, parameters, rounds=0)
    assert predicted.max() < 0.02  # what the pull to the middle of the bounds leaves
    assert predicted.mean() < np.abs(np.expm1(before.errors)).mean() / 4


def test_families_weigh_the_same(samples):
    weights = fit.family_weights(samples)
    sums = {}
    for sample, weight in zip(samples, weights, strict=True):
        sums[sample.family] = sums.get(sample.family, 0.0) + weight
    assert sum(sums.values()) == pytest.approx(1)
    assert max(sums.values()) == pytest.approx(min(sums.values()))


def test_within_a_grid_only_the_differences_between_layouts_count(samples):
    made = [replace(s, family="one", grid="g") for s in samples[:5]]
    errors = np.array([0.3, 0.3, 0.3, 0.3, 0.35])
    slopes = np.stack([np.ones(5), np.arange(5.0)], axis=1)
    every, steepness, weights = fit_loss.loss_terms(made, errors, slopes)
    assert every[5:] == pytest.approx([-0.01, -0.01, -0.01, -0.01, 0.04])
    assert steepness[5:, 0] == pytest.approx(0)  # what moves all layouts alike orders none
    assert weights[:5].sum() == pytest.approx(1)
    assert weights[5:].sum() == pytest.approx(fit_loss.ORDER)
    assert len(fit_loss.loss_terms(made[:4], errors[:4], slopes[:4])[0]) == 4


def _parameter(name, value, low, high):
    return Parameter(generation="common", name=name, value=value, low=low, high=high)


def test_a_solution_outside_its_bounds_stays_on_them():
    parameters = (_parameter("a", 1.0, 0.5, 2.0), _parameter("b", 1.0, 0.5, 2.0))
    # Errors ask for a factor of e on a alone, and nothing of b.
    slopes = np.array([[1.0, 0.0], [0.0, 1.0]])
    at = solve(parameters, np.zeros(2), np.array([-3.0, 0.0]), slopes, np.array([0.5, 0.5]))
    assert at[0] == pytest.approx(math.log(2.0))
    assert at[1] == pytest.approx(0.0, abs=1e-6)


def test_a_constant_that_no_run_tells_stands_in_the_middle_of_its_bounds():
    parameters = (_parameter("a", 1.0, 0.5, 8.0),)
    at = solve(parameters, np.zeros(1), np.zeros(1), np.zeros((1, 1)), np.ones(1))
    assert math.exp(at[0]) == pytest.approx(2.0)


def test_stray_samples_pull_less_than_their_error():
    parameters = (_parameter("a", 1.0, 1e-3, 1e3),)
    errors = np.array([0.0, 0.0, 0.0, 3.0])
    at = solve(parameters, np.zeros(1), errors, np.ones((4, 1)), np.full(4, 0.25))
    assert abs(at[0]) < 0.1  # the mean would be -0.75


def test_families_of_one_source_and_framework_leave_together():
    row = {"source": "a", "framework": "b", "gpu": "c", "family": "one"}
    other = {**row, "family": "two"}
    assert fit.group_of(row, "family") == fit.group_of(other, "family")
    assert fit.group_of(row, "gpu") == ("c",)
