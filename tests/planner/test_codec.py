"""Records survive JSON; whatever is no record is refused with its place."""

from dataclasses import dataclass
from enum import StrEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.layout import Layout, Offload, Recompute, Schedule
from planner.codec import DecodeError, decode, encode, rounded


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    size: int
    share: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    name: str
    inner: Inner | None
    parts: tuple[Inner, ...] = ()
    pair: tuple[str, float] = ("a", 1.0)
    colour: Colour = Colour.RED
    on: bool = False

    def __post_init__(self):
        if not self.name:
            raise ValueError("name must not be empty")


GOOD = {
    "name": "x",
    "inner": {"size": 1, "share": 0.25},
    "parts": [{"size": 2, "share": 0.5}],
    "pair": ["b", 2.5],
    "colour": "blue",
    "on": True,
}


def test_a_record_survives_the_round_trip():
    record = decode(Outer, GOOD, "outer")
    assert record.parts == (Inner(size=2),)
    assert record.colour is Colour.BLUE
    assert encode(record) == GOOD


def test_missing_fields_with_defaults_are_filled_in():
    assert decode(Outer, {"name": "x", "inner": None}, "outer").pair == ("a", 1.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"size": 3}, ["outer", "unknown key 'size'", "colour"]),
        ({"inner": {"share": 1.0}}, ["outer.inner", "'size'"]),
        ({"inner": {"size": "3"}}, ["outer.inner.size", "int", "'3'"]),
        ({"inner": {"size": True}}, ["outer.inner.size", "int", "True"]),
        ({"inner": {"size": 1.5}}, ["outer.inner.size", "int", "1.5"]),
        ({"parts": {"size": 1}}, ["outer.parts", "list"]),
        ({"parts": [{"size": 1}, 7]}, ["outer.parts[1]", "object", "7"]),
        ({"pair": ["a"]}, ["outer.pair", "2 entries, not 1"]),
        ({"colour": "green"}, ["outer.colour", "red, blue", "'green'"]),
        ({"on": 1}, ["outer.on", "bool", "1"]),
        ({"pair": ["a", float("inf")]}, ["outer.pair[1]", "finite"]),
        ({"name": ""}, ["outer", "must not be empty"]),
    ],
)
def test_what_does_not_belong_is_refused_with_its_place(change, words):
    with pytest.raises(DecodeError) as caught:
        decode(Outer, {**GOOD, **change}, "outer")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("text", ["a\nfits", "a\x1b[31m", "a\x9b", "a\u2028b", "a\ud800"])
def test_texts_that_a_terminal_would_obey_are_refused(text):
    with pytest.raises(DecodeError, match=r"outer\.name must be one line") as caught:
        decode(Outer, {**GOOD, "name": text}, "outer")
    assert str(caught.value).isprintable()


def test_a_whole_number_may_stand_for_a_float():
    assert decode(Inner, {"size": 1, "share": 2}, "inner").share == 2.0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_without_a_json_form_are_refused(value):
    with pytest.raises(ValueError, match="JSON"):
        rounded(value)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_rounding_keeps_nine_digits_and_repeats_itself(value):
    once = rounded(value)
    assert rounded(once) == once
    assert once == pytest.approx(value, rel=1e-8)


def test_a_layout_survives_the_round_trip():
    layout = Layout(
        data_parallel=2,
        pipeline_parallel=2,
        stages_per_rank=2,
        schedule=Schedule.ZBV,
        recompute=Recompute.FULL,
        offload=(Offload.OPTIMIZER, Offload.PARAMETERS),
        layers_per_stage=(1, 2, 2, 1),
    )
    assert decode(Layout, encode(layout), "layout") == layout
