"""A profile fitted to runs finds what made them, and says what does not belong."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from costmodels.profiles.reader import profile_from_toml, read_profile
from costmodels.profiles.writer import profile_to_toml
from costmodels.time.estimate import estimate_time
from planner.measured.fit import read_samples
from planner.measured.fit_profile import fit_profile

RUNS = Path(__file__).parents[2] / "golden" / "measured_runs.csv"


@pytest.fixture(scope="module")
def runs():
    with RUNS.open(newline="") as file:
        rows = [r for r in csv.DictReader(file) if r["family"] == "megatron-lm/2020-V100"]
    return [row for row in rows if row["tokens_per_sec_per_gpu"]]


def test_a_fit_is_no_worse_than_the_generations_constants(runs):
    fitted = fit_profile(runs)
    assert fitted.num_runs == len(runs)
    assert fitted.mean_error <= fitted.error_before + 1e-6


def test_a_fitted_profile_can_be_written_and_read_back(runs):
    profile = fit_profile(runs).profile
    assert profile_from_toml(profile_to_toml(profile)) == profile
    fitted = [source for source in profile.provenance if source.kind == "fitted"]
    assert fitted
    assert all(source.low < source.high for source in fitted)


@pytest.fixture(scope="module")
def own_constants():
    """Runs of a generation that has own values of constants that all others share."""
    with RUNS.open(newline="") as file:
        rows = [r for r in csv.DictReader(file) if r["family"] == "llm-foundry/A100-80"]
    return rows[::8]


def test_the_profile_that_is_written_has_the_error_that_is_reported(own_constants):
    fitted = fit_profile(own_constants)
    profile = profile_from_toml(profile_to_toml(fitted.profile))
    errors = []
    for sample in read_samples(own_constants):
        asked = sample.asked
        cluster = replace(asked.cluster, profile=profile)
        time = estimate_time(asked.model, asked.job, cluster, sample.layout)
        errors.append(abs(time.tokens_per_second_per_gpu / sample.rate - 1))
    assert fitted.num_runs == len(errors)
    assert sum(errors) / len(errors) == pytest.approx(fitted.mean_error, rel=1e-9)
    assert fitted.mean_error < fitted.error_before


def test_constants_that_no_run_tells_stay_as_they_are(own_constants):
    before = read_profile("a100-sxm-80gb").calibration
    after = fit_profile(own_constants).profile.calibration
    for name in ("all_to_all_share", "host_launch", "flash_1_share", "fp8_efficiency"):
        assert after[name] == before[name], name
    assert after["gemm_efficiency"] != before["gemm_efficiency"]


def test_a_run_that_differs_from_all_others_is_named(runs):
    slow = {**runs[0], "id": "odd", "tokens_per_sec_per_gpu": "1"}
    assert "odd" in [outlier.run for outlier in fit_profile([*runs, slow]).outliers]


def test_a_run_above_the_machines_peak_is_refused_by_name(runs):
    fast = {**runs[0], "id": "too-fast", "tokens_per_sec_per_gpu": "1e9"}
    with pytest.raises(ValueError, match=r"too-fast.*peaks at"):
        fit_profile([*runs, fast])


def test_several_machines_are_refused(runs):
    other = {**runs[0], "gpu": "A100-SXM-80GB"}
    with pytest.raises(ValueError, match="one machine at a time"):
        fit_profile([*runs, other])


def test_too_few_runs_are_refused(runs):
    with pytest.raises(ValueError, match="a fit takes 3"):
        fit_profile(runs[:2])
