"""`measure_profile`: from forked ranks to a profile that reads back."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from costmodels.hardware import usable_memory
from costmodels.profiles.reader import profile_from_toml, read_profile
from costmodels.profiles.writer import profile_to_toml
from costmodels.units import GIB
from runtime.launch import run_ranks
from runtime.measure import kernels, profile, program_fit, steps, transfers
from runtime.measure.profile import build_profile, measure_profile
from runtime.measure.samples import sample

MACHINE = {
    "name": "A processor",
    "generation": "cpu",
    "num_sms": 1,
    "memory": 6 * GIB,
    "usable_fraction": 0.99,
    "host_memory": 24 * GIB,
    "torch": "2.13.0",
}


def local_samples():
    yield sample("empty", "fp32", 3e-6)
    for moved in (1e6, 1e7, 1e8):
        yield sample("memory_pass", "fp32", 3e-6 + moved / 8e9, moved=moved, kernels=1)
    for precision, rate, width in (("fp32", 8e10, 4), ("bf16", 2e11, 2)):
        for size in (256, 512, 1024):
            shape = {"m": size, "n": size, "k": size, "count": 1, "element_bytes": width}
            yield sample("gemm", precision, 3e-6 + 2 * size**3 / rate, **shape)
        for name, flops in (("attention_forward", 2.0), ("attention_backward", 5.0)):
            for length in (128, 512):
                work = flops * length * length * 64
                yield sample(
                    name,
                    precision,
                    3e-6 + work / 3e10,
                    attention_flops=work,
                    length=length,
                    head_width=64,
                    kernels=1,
                )


def test_what_one_host_cannot_tell_stays_as_the_nearest_machine_has_it():
    measured = build_profile("cpu", 1, MACHINE, list(local_samples()))
    nearest = read_profile("cpu-gloo")
    assert measured.inter_node == nearest.inter_node
    assert measured.intra_node.bandwidth == nearest.intra_node.bandwidth
    kinds = {p.key: p.kind for p in measured.provenance}
    assert kinds["links.inter_node.gb_per_s"] == "chosen"
    assert kinds["device.peak_tflops.bf16"] == kinds["constants.k_fill"] == "measured"


def test_ranks_become_the_node_and_the_formats_that_were_measured_the_peaks():
    measured = build_profile("cpu", 4, MACHINE, list(local_samples()))
    assert measured.name == "measured-cpu-4"
    assert measured.gpus_per_node == measured.intra_node.num_devices == 4
    assert measured.host_memory == 24 * GIB
    assert usable_memory(measured) == pytest.approx(5.94 * GIB)
    assert [name for name, _ in measured.device.peak_flops] == ["bf16", "fp32"]
    efficiency = measured.calibration["gemm_efficiency"]
    assert measured.device.peak("fp32") * efficiency == pytest.approx(8e10, rel=0.05)
    assert measured.device.peak("bf16") * efficiency == pytest.approx(2e11, rel=0.05)


def test_a_measured_profile_reads_back_and_says_where_its_numbers_come_from():
    measured = build_profile("cpu", 2, MACHINE, list(local_samples()))
    text = profile_to_toml(measured)
    assert profile_from_toml(text) == measured
    assert "A processor, 2 processes at once, torch 2.13.0: 6 products, median error" in text
    assert "memory_gib = { value = 6," in text


@pytest.mark.parametrize(
    ("device", "ranks", "words"),
    [("tpu", 2, "cpu or cuda, not 'tpu'"), ("cpu", 0, "1 to 64"), ("cpu", 65, "not 65")],
)
def test_what_cannot_be_measured_is_refused(device, ranks, words):
    with pytest.raises(ValueError, match=words):
        measure_profile(device, ranks)


def test_more_gpus_than_there_are_is_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"--ranks 4 .* this machine has 1"):
        measure_profile("cuda", 4)


@pytest.fixture
def small_shapes(monkeypatch):
    """Shapes too small to tell much, and repeats to match."""
    small = kernels.Shapes(
        products=((32, 64, 64), (64, 128, 128)), lengths=(32, 64), num_heads=2, passes=(4096, 65536)
    )
    monkeypatch.setitem(kernels.SHAPES, "cpu", small)
    monkeypatch.setitem(kernels.ROUND_BYTES, "cpu", 2**18)
    monkeypatch.setitem(transfers.SIZES, "cpu", (1024, 16384))
    monkeypatch.setitem(transfers.OVERLAP_BYTES, "cpu", 16384)
    monkeypatch.setitem(transfers.OVERLAP_WIDTH, "cpu", 32)
    smallest = replace(steps.DECODERS[0], num_layers=1, shapes=((1, 8), (2, 8), (1, 16)))
    for module in (steps, program_fit):
        monkeypatch.setattr(module, "DECODERS", (smallest,))
    monkeypatch.setattr(profile, "Stopwatch", partial(profile.Stopwatch, repeat_seconds=1e-3))


def test_two_ranks_measure_this_machine(small_shapes, monkeypatch):
    """The whole way with real processes."""
    monkeypatch.setattr(profile, "NUM_ROUNDS", 1)
    measured = measure_profile("cpu", 2)
    assert profile_from_toml(profile_to_toml(measured)) == measured
    assert {p.kind for p in measured.provenance if p.key.startswith("links.intra")} == {"measured"}
    assert measured.generation == "cpu"
    assert measured.device.name != ""


def test_a_round_that_would_end_too_late_is_not_begun(small_shapes, monkeypatch):
    monkeypatch.setattr(profile, "ROUNDS_SECONDS", 1e-6)

    graphs = steps.traced_decoders(1)

    def work(world):
        said = []
        profile._measure(world, graphs, said.append, shares_cores=False)
        return said

    said = run_ranks(work, 1)[0]
    assert [line.partition(":")[0] for line in said[:4]] == ["round 1 of 3"] * 4
    assert "for 1 of 3 rounds" in said[4]
    assert len(said) == 5


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="no CUDA device here")
def test_a_gpu_measures_itself():
    measured = measure_profile("cuda", 1)
    assert profile_from_toml(profile_to_toml(measured)) == measured
    assert measured.device.peak("fp16") > measured.device.peak("fp32")
