"""Profiles from TOML: layers, overrides, refusals; and back."""

from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hardware_profiles
from costmodels.hardware import Provenance
from costmodels.profiles.reader import (
    generation_constants,
    profile_from_toml,
    profile_names,
    read_profile,
)
from costmodels.profiles.writer import profile_to_toml
from costmodels.units import GIB

BARE = """
schema = 1
name = "mine"
generation = "hopper"
[sources]
sheet = "a data sheet"
[device]
name = "A card"
memory_gib = 80
memory_gb_per_s = 3350
num_sms = 132
host_gb_per_s = 63
[device.peak_tflops]
bf16 = 989.4
[node]
gpus_per_node = 8
host_memory_gib = 2048
[links.intra_node]
kind = "nvlink"
gb_per_s = { value = 450, kind = "datasheet", source = "sheet: half of 900" }
latency_us = { value = 1.9, kind = "measured", source = "a table", low = 0.6, high = 3.4 }
peer_access = true
[links.inter_node]
kind = "infiniband"
gb_per_s = 50
latency_us = 4
"""


@pytest.fixture
def common_constants(monkeypatch):
    """Two constants for all generations, one of them Hopper's own."""
    texts = {
        "common": """
            schema = 1
            [constants]
            launch_seconds = { value = 6e-6, kind = "measured", source = "a trace" }
            tile_rows = { value = 128, kind = "chosen", source = "usual" }
            """,
        "hopper": """
            schema = 1
            [constants]
            launch_seconds = { value = 4e-6, kind = "fitted", source = "runs", low = 2e-6 }
            """,
    }
    monkeypatch.setattr(hardware_profiles, "generation_text", texts.__getitem__)
    return texts


def source_of(profile, key):
    return next((p for p in profile.provenance if p.key == key), None)


def test_units_of_the_file_become_si():
    profile = profile_from_toml(BARE)
    assert profile.device.memory == 80 * 2**30
    assert profile.device.memory_bandwidth == 3.35e12
    assert profile.device.peak("bf16") == 9.894e14
    assert profile.host_memory == 2**41
    assert profile.intra_node.bandwidth == 4.5e11
    assert profile.intra_node.latency == 1.9e-6
    assert profile.inter_node.latency == 4e-6
    assert profile.device.power_watts is None


def test_the_domain_is_the_node_unless_devices_says_more():
    assert profile_from_toml(BARE).intra_node.num_devices == 8
    wide = BARE.replace('kind = "nvlink"', 'kind = "nvlink"\ndevices = 72')
    assert profile_from_toml(wide).intra_node.num_devices == 72
    assert profile_from_toml(BARE).inter_node.num_devices == 0


def test_a_short_source_name_is_written_out_and_keeps_its_detail():
    profile = profile_from_toml(BARE)
    assert source_of(profile, "links.intra_node.gb_per_s") == Provenance(
        key="links.intra_node.gb_per_s", kind="datasheet", source="a data sheet: half of 900"
    )
    assert source_of(profile, "links.intra_node.latency_us") == Provenance(
        key="links.intra_node.latency_us", kind="measured", source="a table", low=0.6, high=3.4
    )
    assert source_of(profile, "device.memory_gib") is None


def test_a_generation_covers_the_common_constants_and_a_profile_covers_both(common_constants):
    assert dict(profile_from_toml(BARE).calibration.constants) == {
        "launch_seconds": 4e-6,
        "tile_rows": 128.0,
    }
    own = BARE + "[constants]\ntile_rows = 256\n"
    assert profile_from_toml(own).calibration["tile_rows"] == 256.0
    assert profile_from_toml(own).calibration["launch_seconds"] == 4e-6


def test_a_constant_that_common_lacks_is_refused_in_profiles_and_generations(common_constants):
    with pytest.raises(ValueError, match=r"unknown key 'tile_row'.*tile_rows"):
        profile_from_toml(BARE + "[constants]\ntile_row = 256\n")
    common_constants["hopper"] += '\nwarp = { value = 1, kind = "chosen", source = "x" }'
    with pytest.raises(ValueError, match=r"generations/hopper.toml: unknown key 'warp'"):
        generation_constants("hopper")


def test_a_constant_of_a_generation_needs_a_source(common_constants):
    common_constants["hopper"] = "schema = 1\n[constants]\ntile_rows = 128\n"
    with pytest.raises(ValueError, match=r"hopper.toml: constants.tile_rows needs a table"):
        generation_constants("hopper")


def test_a_constant_may_be_zero_but_not_negative(common_constants):
    assert profile_from_toml(BARE + "[constants]\ntile_rows = 0\n").calibration["tile_rows"] == 0
    with pytest.raises(ValueError, match="tile_rows must be a finite number of at least 0, not -1"):
        profile_from_toml(BARE + "[constants]\ntile_rows = -1\n")


def test_set_overrides_the_keys_of_the_contract():
    profile = read_profile(
        "h100-sxm-80gb",
        ("device.memory_gib=95", "links.inter_node.gb_per_s=12.5", "node.host_memory_gib=559"),
    )
    assert profile.device.memory == 95 * GIB
    assert profile.inter_node.bandwidth == 12.5e9
    assert profile.host_memory == 559 * GIB
    assert source_of(profile, "device.memory_gib") == Provenance(
        key="device.memory_gib", kind="stated", source="--set device.memory_gib=95"
    )


def test_set_takes_a_key_once():
    twice = ("device.memory_gib=95", " device.memory_gib = 80")
    with pytest.raises(ValueError, match=r"device\.memory_gib is set twice"):
        read_profile("h100-sxm-80gb", twice)


def test_set_changes_nothing_else():
    changed = read_profile("h100-sxm-80gb", ("links.intra_node.peer_access=false",))
    plain = read_profile("h100-sxm-80gb")
    assert not changed.intra_node.peer_access
    assert replace(changed, intra_node=plain.intra_node, provenance=plain.provenance) == plain


def test_a_smaller_node_has_a_smaller_domain():
    profile = read_profile("h100-sxm-80gb", ("node.gpus_per_node=4",))
    assert profile.intra_node.num_devices == 4
    assert read_profile("gb200-nvl72", ("node.gpus_per_node=2",)).intra_node.num_devices == 72


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("device.memry_gib=80", ["device.memry_gib", "did you mean device.memory_gib"]),
        ("device.memory_gib=lots", ["device.memory_gib", "lots", "finite number"]),
        ("device.memory_gib=0", ["device.memory_gib", "positive"]),
        ("device.memory_gib=-80", ["positive finite number, not -80"]),
        ("device.memory_gib=nan", ["finite number"]),
        ("device.memory_gib=inf", ["finite number"]),
        ("device.memory_gib=1e400", ["positive finite number"]),
        ("device.memory_gib=1e-400", ["positive finite number"]),
        ("links.inter_node.latency_us=1e-320", ["positive finite number"]),
        ("device.memory_gib", ["KEY=VALUE"]),
        ("=80", ["unknown key ''"]),
        ("device.num_sms=1.5", ["whole number"]),
        ("device.usable_fraction=1.2", ["at most 1"]),
        ("name=other", ["unknown key 'name'"]),
        ("links.intra_node.peer_access=1", ["true or false"]),
        ("constants.no_such_constant=1", ["constants.no_such_constant"]),
    ],
)
def test_set_refuses_what_no_profile_may_have(override, words):
    with pytest.raises(ValueError, match="--set") as error:
        read_profile("h100-sxm-80gb", (override,))
    assert all(word in str(error.value) for word in words)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="h1000-sxm") as error:
        read_profile("h1000-sxm")
    assert all(name in str(error.value) for name in profile_names())


def test_two_names_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"--hardware takes one machine.*smallest"):
        read_profile("rtx4090-24gb,rtx3090-24gb")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("schema = 1", "schema = 2", "schema must be 1, not 2"),
        ("schema = 1", "", "schema must be 1, not None"),
        ('generation = "hopper"', 'generation = "pascal"', "'pascal' is none of: ada, ampere"),
        ("memory_gib = 80", "memory_gib = '80'", "memory_gib must be a finite number"),
        ("memory_gib = 80", "memory_gib = true", "memory_gib must be a finite number"),
        ("memory_gib = 80", "memory_gib = [80]", "memory_gib must be a finite number"),
        ("memory_gib = 80", "memory_gib = nan", "memory_gib must be a finite number"),
        ("memory_gib = 80", "", "device.memory_gib is missing"),
        ("memory_gib = 80", "memory_gib = 80\nmemory_gb = 80", "unknown key 'device.memory_gb'"),
        ("bf16 = 989.4", "", "peak_tflops] needs one of bf16"),
        ("bf16 = 989.4", "int8 = 1979", "unknown key 'device.peak_tflops.int8'"),
        ('kind = "nvlink"', 'kind = "a\\nb"', "links.intra_node.kind must be a short name"),
        ("peer_access = true", "peer_access = 1", "peer_access must be true or false"),
        ('sheet = "a data sheet"', "sheet = 1", "[sources] must map"),
        ('source = "a table"', 'source = ""', "source must be a text"),
        ('kind = "measured"', 'kind = "guessed"', "kind must be one of"),
        ('kind = "measured", ', "", "kind is missing"),
        ("low = 0.6", "lo = 0.6", "'lo' is none of"),
        ("low = 0.6", "low = 'x'", "latency_us.low must be a finite number"),
        ("[node]", "[node", "not TOML"),
        ("gpus_per_node = 8", "gpus_per_node = 8.5", "gpus_per_node must be a whole number"),
        ("gpus_per_node = 8", f"gpus_per_node = {'9' * 5000}", "not a profile"),
        ("memory_gib = 80", f"memory_gib = {'[' * 5000}", "not a profile"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_with_the_reason(old, new, words):
    assert old in BARE
    with pytest.raises(ValueError, match=r"rack\.toml") as error:
        profile_from_toml(BARE.replace(old, new, 1), "rack.toml")
    assert words in str(error.value)


def test_files_are_read_by_path_and_unreadable_ones_are_named(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(BARE, encoding="utf-8")
    assert read_profile(str(path)) == profile_from_toml(BARE)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"mine\.toml: not UTF-8"):
        read_profile(str(path))
    path.write_text("# " + "x" * 2**20, encoding="utf-8")
    with pytest.raises(ValueError, match="too long for a profile"):
        read_profile(str(path))
    with pytest.raises(ValueError, match=r"none\.toml: cannot be read: No such file"):
        read_profile(str(tmp_path / "none.toml"))
    with pytest.raises(ValueError, match="cannot be read"):
        read_profile(str(tmp_path) + "/")


@pytest.mark.parametrize("name", profile_names())
def test_writing_and_reading_a_built_in_machine_is_the_identity(name):
    profile = read_profile(name)
    assert profile_from_toml(profile_to_toml(profile)) == profile


def test_what_set_changed_is_written_with_its_source():
    profile = read_profile("gb200-nvl72", ("device.memory_gib=180.5",))
    text = profile_to_toml(profile)
    assert 'memory_gib = { value = 180.5, kind = "stated"' in text
    assert profile_from_toml(text) == profile


def test_only_constants_that_differ_from_the_generation_are_written(common_constants):
    own = BARE + '[constants]\ntile_rows = { value = 256, kind = "measured", source = "here" }\n'
    text = profile_to_toml(profile_from_toml(own))
    assert "tile_rows" in text
    assert "launch_seconds" not in text
    assert profile_from_toml(text) == profile_from_toml(own)


@settings(max_examples=200, deadline=None)
@given(
    name=st.text(
        st.characters(min_codepoint=32, exclude_categories=("Cs",), exclude_characters="\x7f"),
        min_size=1,
        max_size=60,
    ),
    bandwidth=st.floats(1e-3, 1e16),
    latency=st.floats(1e-9, 10),
    memory=st.integers(1, 2**50),
    source=st.text(st.characters(exclude_categories=("Cs",)), min_size=1).filter(str.strip),
)
def test_round_trip_is_bit_exact_for_any_number_and_any_text(
    name, bandwidth, latency, memory, source
):
    plain = profile_from_toml(BARE)
    profile = replace(
        plain,
        device=replace(plain.device, name=name, memory=memory, memory_bandwidth=bandwidth),
        intra_node=replace(plain.intra_node, latency=latency),
        provenance=tuple(
            replace(p, source=source) if p.key == "device.usable_fraction" else p
            for p in plain.provenance
        ),
    )
    assert profile_from_toml(profile_to_toml(profile)) == profile


def test_numbers_stay_decimal_until_they_are_scaled():
    text = BARE.replace("latency_us = 4", "latency_us = 0.3")
    assert profile_from_toml(text).inter_node.latency == float(Decimal("0.3e-6"))
