"""Bounded robust fits: exact on exact data, steady under strays, honest about what is not told."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.least_squares import Unknown, fit

SIZES = np.geomspace(1e3, 1e8, 24)


def seconds(constants):
    latency, bandwidth = constants
    return latency + SIZES / bandwidth


def unknowns(low=1e-12, high=1e15):
    return [
        Unknown(name="latency", start=1e-5, low=low, high=1.0),
        Unknown(name="bandwidth", start=1e9, low=1.0, high=high),
    ]


@settings(max_examples=60, deadline=None)
@given(st.floats(-6, -2), st.floats(8, 11.5))
def test_exact_samples_give_the_constants_back(latency, bandwidth):
    true = np.array([10.0**latency, 10.0**bandwidth])
    told = fit(seconds, seconds(true), unknowns())
    # A latency a thousand times under every sample's bandwidth term cannot be told apart.
    weight = true[0] / seconds(true).min()
    if weight > 0.05:
        assert told.values[0] == pytest.approx(true[0], rel=1e-2)
    share = (SIZES[-1] / true[1]) / seconds(true)[-1]
    if share > 0.05:
        assert told.values[1] == pytest.approx(true[1], rel=1e-2)
    assert told.median_error < 1e-3


def test_one_stray_sample_in_24_moves_the_constants_by_less_than_a_percent():
    measured = seconds(np.array([2e-5, 5e9]))
    measured[12] *= 50
    told = fit(seconds, measured, unknowns(), huber=0.02)
    assert told.values == pytest.approx((2e-5, 5e9), rel=0.01)
    assert told.errors[12] == pytest.approx(-0.98, abs=0.01)


def test_bounds_hold_and_the_rest_adapts():
    measured = seconds(np.array([2e-5, 5e9]))
    told = fit(seconds, measured, unknowns(high=2e9))
    assert told.values[1] == pytest.approx(2e9)
    assert told.median_error > 0.1


def test_a_constant_that_no_sample_depends_on_stays_and_has_no_spread():
    told = fit(
        lambda c: SIZES / c[0],
        SIZES / 7e9,
        [
            Unknown(name="bandwidth", start=1e9, low=1.0, high=1e15),
            Unknown(name="idle", start=3.0, low=1.0, high=9.0),
        ],
    )
    assert told.values == pytest.approx((7e9, 3.0))
    assert told.spread[1] == float("inf")
    assert told.spread[0] < 1e-6


def test_spread_is_the_standard_error_of_a_mean():
    noise = np.random.default_rng(0).normal(0, 0.05, 400)
    told = fit(
        lambda c: np.full(400, c[0]),
        np.exp(noise),
        [Unknown(name="c", start=2.0, low=0.1, high=10.0)],
        huber=1.0,
    )
    assert told.spread[0] == pytest.approx(0.05 / np.sqrt(400), rel=0.1)
    assert told.values[0] == pytest.approx(1.0, abs=0.01)


def test_weights_choose_between_samples_that_disagree():
    def constant(c):
        return np.full(2, c[0])

    unknown = [Unknown(name="c", start=2.0, low=0.1, high=10.0)]
    told = fit(constant, [1.0, 4.0], unknown, weights=[1.0, 3.0], huber=10.0)
    assert told.values[0] == pytest.approx(4.0**0.75, rel=1e-3)  # weighted mean of the logs


def test_samples_that_are_not_positive_are_refused():
    with pytest.raises(ValueError, match="positive"):
        fit(seconds, np.zeros(24), unknowns())


def test_bounds_that_hold_no_value_are_refused():
    with pytest.raises(ValueError, match="latency"):
        Unknown(name="latency", start=1.0, low=2.0, high=3.0)
