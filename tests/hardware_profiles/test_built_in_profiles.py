"""The built-in machines: every number has a source, and the figures are those of the vendors."""

import tomllib

import pytest

import hardware_profiles
from costmodels.hardware import make_cluster, usable_memory
from costmodels.job import Target, TrainingJob
from costmodels.profiles.reader import generation_constants, read_profile
from costmodels.profiles.schema import MACHINE_KEYS, STATED, TEXTS
from costmodels.time.rates import rates_of
from costmodels.units import GB, GIB, TFLOP

NAMES = hardware_profiles.profile_names()
CONTRACT_NAMES = """
v100-sxm2-16gb v100-sxm2-32gb v100-sxm3-32gb a100-sxm-40gb a100-sxm-80gb a800-sxm-80gb
h100-sxm-80gb h100-sxm-94gb h100-sxm-96gb h200-sxm-141gb h800-sxm-80gb h20-96gb gh200-96gb
b200-sxm-180gb b300-sxm-270gb gb200-nvl72 gb300-nvl72 mi300x-192gb mi350x-288gb mi355x-288gb
l40s-48gb a10-24gb rtx3090-24gb rtx4090-24gb cpu-gloo
"""


def test_every_machine_that_is_promised_is_there():
    assert sorted(NAMES) == sorted(CONTRACT_NAMES.split())


@pytest.mark.parametrize("name", NAMES)
def test_the_name_in_the_file_is_the_files_name(name):
    assert read_profile(name).name == name


@pytest.mark.parametrize("name", NAMES)
def test_every_number_names_its_source_and_kind(name):
    profile = read_profile(name)
    text = tomllib.loads(hardware_profiles.profile_text(name))
    sourced = {p.key for p in profile.provenance}
    for key, kind in MACHINE_KEYS.items():
        stands = key == "device.usable_fraction" or _holds(text, key)
        assert (key in sourced) == (stands and kind.type not in TEXTS)
    assert all(p.kind != STATED and len(p.source) > 5 for p in profile.provenance)


@pytest.mark.parametrize("name", NAMES)
def test_plausible_ranges_hold_the_value(name):
    text = tomllib.loads(hardware_profiles.profile_text(name))
    for entry in _tables_with_a_value(text):
        if "low" in entry:
            assert entry["low"] <= entry["value"] <= entry["high"]


@pytest.mark.parametrize("generation", hardware_profiles.generation_names())
def test_generations_know_only_common_constants_and_bound_their_values(generation):
    for name, entry in generation_constants(generation).items():
        low = entry.value if entry.low is None else entry.low
        high = entry.value if entry.high is None else entry.high
        assert low <= entry.value <= high, name


@pytest.mark.parametrize("name", NAMES)
def test_the_nominal_memory_is_the_one_in_the_name(name):
    nominal = {"gb200-nvl72": 186, "gb300-nvl72": 288, "cpu-gloo": 4}.get(name)
    nominal = nominal or int(name.rpartition("-")[2].removesuffix("gb"))
    assert read_profile(name).device.memory == nominal * GIB


def test_the_driver_leaves_about_one_percent_less_but_on_cards_with_ecc_on_gddr():
    left = {
        name: usable_memory(read_profile(name)) / read_profile(name).device.memory for name in NAMES
    }
    ecc = {"l40s-48gb", "a10-24gb"}
    shown = {"gb300-nvl72"}  # 279 of the 288 GB on the package
    assert all(0.98 < left[name] < 1 for name in set(NAMES) - ecc - shown)
    assert all(left[name] == pytest.approx(15 / 16 * 0.987, abs=0.002) for name in ecc)
    assert 79.1 * GIB <= usable_memory(read_profile("h100-sxm-80gb")) <= 79.2 * GIB


# Dense tensor peaks: bf16 (fp16 on Volta), fp8; memory GB/s; GB/s to peers and between nodes.
VENDOR_FIGURES = {
    "v100-sxm2-32gb": (125, None, 900, 150, 6.25),
    "a100-sxm-40gb": (312, None, 1555, 300, 25),
    "a100-sxm-80gb": (312, None, 2039, 300, 25),
    "a800-sxm-80gb": (312, None, 2039, 200, 25),
    "h100-sxm-80gb": (989.4, 1978.9, 3350, 450, 50),
    "h800-sxm-80gb": (989.4, 1978.9, 3350, 200, 50),
    "h20-96gb": (148, 296, 4000, 450, 50),
    "h200-sxm-141gb": (989.4, 1978.9, 4800, 450, 50),
    "b200-sxm-180gb": (2250, 4500, 7672, 900, 50),
    "gb200-nvl72": (2450, 4900, 8000, 900, 50),
    "mi300x-192gb": (1307.4, 2614.9, 5300, 448, 50),
    "mi355x-288gb": (2516.6, 5033.2, 8000, 537.6, 50),
    "rtx4090-24gb": (165.2, 330.3, 1008, 31.5, 1.5625),
}


@pytest.mark.parametrize("name", VENDOR_FIGURES)
def test_figures_are_the_vendors_dense_ones(name):
    profile = read_profile(name)
    device = profile.device
    half, fp8, memory, inside, between = VENDOR_FIGURES[name]
    assert (device.peak("bf16") or device.peak("fp16")) == pytest.approx(half * TFLOP)
    assert device.peak("fp8") == (None if fp8 is None else pytest.approx(fp8 * TFLOP))
    assert device.memory_bandwidth == pytest.approx(memory * GB)
    assert profile.intra_node.bandwidth == pytest.approx(inside * GB)
    assert profile.inter_node.bandwidth == pytest.approx(between * GB)


@pytest.mark.parametrize("name", NAMES)
def test_peaks_rise_as_precision_falls(name):
    peak = read_profile(name).device.peak
    order = [peak(p) for p in ("fp32", "tf32", "bf16", "fp8", "nvfp4") if peak(p) is not None]
    assert order == sorted(order)
    assert peak("mxfp8") in (None, peak("fp8"))
    assert peak("fp16") in (None, peak("bf16")) or peak("bf16") is None


def test_only_volta_lacks_bf16():
    assert {n for n in NAMES if read_profile(n).device.peak("bf16") is None} == {
        n for n in NAMES if n.startswith("v100")
    }


def test_an_nvl72_rack_is_hosts_of_four_in_one_domain_of_72():
    for name in ("gb200-nvl72", "gb300-nvl72"):
        cluster = make_cluster(read_profile(name), 144)
        assert (cluster.gpus_per_node, cluster.scale_up_size, cluster.num_nodes) == (4, 72, 36)


def test_geforce_cards_have_no_peer_access():
    without = {n for n in NAMES if not read_profile(n).intra_node.peer_access}
    assert without == {"rtx3090-24gb", "rtx4090-24gb"}


def test_power_limited_parts_keep_the_peaks_and_say_500_watts():
    full = read_profile("h100-sxm-80gb").device
    for name in ("h100-sxm-94gb", "h100-sxm-96gb"):
        device = read_profile(name).device
        assert device.power_watts == 500
        assert full.power_watts == 700
        assert device.peak_flops == full.peak_flops


def test_a_part_with_cut_tensor_cores_computes_at_its_own_peak():
    # Kernels on an H20 (Dao-AILab/flash-attention#1310): causal attention of 2048 tokens, forward.
    job = TrainingJob(seq_len=2048, global_batch_size=8, target=Target.MEGATRON)
    rates = rates_of(job, read_profile("h20-96gb"))
    assert rates.peak == 148 * TFLOP
    filled = 2048 / (2048 + rates.length_fill)
    assert rates.peak * rates.attention_forward * filled == pytest.approx(107.8 * TFLOP, rel=0.01)
    limited = rates_of(job, read_profile("h100-sxm-96gb"))
    assert limited.peak < 989.4 * TFLOP


@pytest.mark.parametrize(
    ("cut", "full"), [("h800-sxm-80gb", "h100-sxm-80gb"), ("a800-sxm-80gb", "a100-sxm-80gb")]
)
def test_a_cut_link_is_used_better_than_the_full_one_and_no_better_than_kernels(cut, full):
    job = TrainingJob(seq_len=2048, global_batch_size=8)
    ours, theirs = (rates_of(job, read_profile(name)).inner_bandwidth for name in (cut, full))
    links = read_profile(cut).intra_node.bandwidth / read_profile(full).intra_node.bandwidth
    assert links < ours / theirs < 1
    assert ours < 158 * GB  # deepseek-ai/DeepEP, on an H800


def _holds(text, dotted):
    for part in dotted.split("."):
        if not isinstance(text, dict) or part not in text:
            return False
        text = text[part]
    return True


def _tables_with_a_value(table):
    for value in table.values():
        if isinstance(value, dict):
            if "value" in value:
                yield value
            else:
                yield from _tables_with_a_value(value)
