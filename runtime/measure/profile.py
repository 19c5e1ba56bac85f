"""`measure_profile`: one HardwareProfile from measurements on this machine.

Ranks are forked, measure together, and hand their samples back; the fit runs in the caller. What
cannot be measured from one host (the network between nodes) stays as the nearest built-in machine
has it, with its source.
"""

import os
import time
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from costmodels.hardware import HardwareProfile
from costmodels.layout import Layout
from costmodels.profiles.reader import profile_entries, profile_from_entries
from costmodels.profiles.schema import MACHINE_KEYS, Entry
from costmodels.units import GIB
from runtime.communication.cores import available_cores
from runtime.communication.mesh import World
from runtime.launch import run_ranks
from runtime.measure.fitting import (
    Found,
    fit_attention,
    fit_links,
    fit_overlap,
    fit_passes,
    fit_products,
)
from runtime.measure.kernels import kernel_samples
from runtime.measure.program_fit import fit_programs
from runtime.measure.samples import Sample, from_json, to_json, typical_of
from runtime.measure.steps import program_samples, traced_decoders
from runtime.measure.stopwatch import Stopwatch
from runtime.measure.transfers import overlap_samples, transfer_samples

TIMEOUT = 600.0  # s for all of it; four ranks on two cores take about one minute
NUM_ROUNDS = 3  # far enough apart that one disturbance does not spoil the same sample twice
ROUNDS_SECONDS = 140.0  # a busy machine gets fewer rounds, so that all ends within three minutes
MAX_RANKS = 64  # processes of one host; more would measure nothing but the scheduler
SIGNIFICANT_DIGITS = 4  # beyond what repeats agree on
PCIE_5_GB_PER_S = 63  # one direction of 16 lanes; a faster link between GPUs is no PCI Express
# What stands in for the things that one host cannot tell.
NEAREST = {
    "cpu": "cpu-gloo",
    "volta": "v100-sxm2-32gb",
    "ampere": "a100-sxm-80gb",
    "ada": "l40s-48gb",
    "hopper": "h100-sxm-80gb",
    "blackwell": "b200-sxm-180gb",
    "cdna3": "mi300x-192gb",
    "cdna4": "mi355x-288gb",
}
_GENERATION_OF_CAPABILITY = {7: "volta", 8: "ampere", 9: "hopper", 10: "blackwell"}
_ADA = (8, 9)


def measure_profile(
    device: str, ranks: int, progress: Callable[[str], None] = lambda _: None
) -> HardwareProfile:
    """Measure this machine and return it as a profile.

    Args:
        device: "cpu" or "cuda".
        ranks: Processes that work at the same time, one per GPU; on a CPU one thread each. They
            become the profile's node.
        progress: Told what is being measured.

    Raises:
        ValueError: No such device, or not as many of it.

    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, not {device!r}")
    if not 1 <= ranks <= MAX_RANKS:
        raise ValueError(
            f"--ranks must be 1 to {MAX_RANKS}, the processes of one host, not {ranks}"
        )
    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise ValueError(
            f"--ranks {ranks} needs as many GPUs, and this machine has {torch.cuda.device_count()}"
        )
    torch.set_num_threads(1)  # before the fork: OpenMP's threads do not survive it

    graphs = traced_decoders(ranks) if device == "cpu" else ()
    shares_cores = ranks > available_cores()  # before ranks are bound to theirs

    def work(world: World) -> dict[str, Any]:
        say = progress if world.rank == 0 else lambda _: None
        return _measure(world, graphs, say, shares_cores=shares_cores)

    told = run_ranks(work, ranks, timeout=TIMEOUT, device_type=device)[0]
    samples = [from_json(value) for value in told["samples"]]
    return build_profile(device, ranks, told["machine"], samples)


def _measure(
    world: World,
    graphs: Sequence[GraphModule],
    progress: Callable[[str], None],
    *,
    shares_cores: bool,
) -> dict[str, Any]:
    """Measure on one rank; every rank takes the same samples in the same order."""
    alone = Layout(data_parallel=world.size, layers_per_stage=(1,))
    watch = Stopwatch(world=world.mesh(alone).group("world"), device=world.device)
    rounds: list[list[Sample]] = []
    start = time.monotonic()
    for number in range(1, NUM_ROUNDS + 1):
        spent, done = watch.agree(time.monotonic() - start), len(rounds)
        if done and spent * number / done > ROUNDS_SECONDS:
            progress(f"{spent:.0f} s for {done} of {NUM_ROUNDS} rounds: no time for another")
            break
        samples: list[Sample] = []
        for name, source in (
            ("kernels", kernel_samples(watch)),
            ("transfers", transfer_samples(watch, world, shares_cores=shares_cores)),
            ("overlap", overlap_samples(watch, world)),
            ("programs", program_samples(watch, world, graphs)),
        ):
            progress(f"round {number} of {NUM_ROUNDS}: {name} on {world.size} ranks")
            samples.extend(source)
        rounds.append(samples)
    typical = typical_of(rounds)
    return {"machine": _machine(world.device), "samples": [to_json(s) for s in typical]}


def build_profile(
    device: str, ranks: int, machine: dict[str, Any], samples: Sequence[Sample]
) -> HardwareProfile:
    """Fit the samples and return the profile.

    Args:
        device: "cpu" or "cuda".
        ranks: Processes that measured.
        machine: What `_machine` says.
        samples: Of every kind that `kernels` and `transfers` take.

    """
    host_is_device = device == "cpu"
    found = fit_passes(samples, host_is_device=host_is_device)
    value = {f.key: f.value for f in found}
    sustained = value["device.memory_gb_per_s"] * value["constants.memory_efficiency"]
    gap = value["constants.kernel_gap"]
    found += fit_products(samples, machine["num_sms"], sustained, gap)
    peaks = {f.key.rpartition(".")[2]: f.value for f in found if "peak_tflops" in f.key}
    found += fit_attention(samples, peaks, gap)
    found += fit_links(samples) + fit_overlap(samples)
    entries = {
        **_unmeasured(NEAREST[machine["generation"]]),
        **_facts(device, ranks, machine, found),
        **{f.key: _entry(f.key, f.value, f"{_who(ranks, machine)}: {f.basis}") for f in found},
    }
    single = profile_from_entries(entries, "what was measured")
    entries |= {
        f.key: _entry(f.key, f.value, f"{_who(ranks, machine)}: {f.basis}")
        for f in fit_programs(samples, single, ranks)
    }
    return profile_from_entries(entries, "what was measured")


def _unmeasured(nearest: str) -> dict[str, Entry]:
    """Return the nearest machine without the peaks, which belong to its own formats."""
    entries = profile_entries(nearest)
    return {key: entry for key, entry in entries.items() if "peak_tflops" not in key}


def _facts(
    device: str, ranks: int, machine: dict[str, Any], found: Sequence[Found]
) -> dict[str, Entry]:
    who = _who(ranks, machine)
    facts: dict[str, Entry] = {
        "name": Entry(value=f"measured-{device}-{ranks}"),
        "generation": Entry(value=machine["generation"]),
        "device.name": Entry(value=machine["name"]),
        "device.num_sms": _entry("device.num_sms", machine["num_sms"], who),
        "device.memory_gib": _entry("device.memory_gib", machine["memory"], who),
        "device.usable_fraction": _entry(
            "device.usable_fraction", machine["usable_fraction"], f"{who}: what processes see"
        ),
        "node.gpus_per_node": _entry("node.gpus_per_node", ranks, f"{who}: ranks that measured"),
        "node.host_memory_gib": _entry("node.host_memory_gib", machine["host_memory"], who),
        "links.intra_node.peer_access": Entry(
            value=True, kind="measured", source=f"{who}: staging is in the measured bandwidth"
        ),
    }
    if device == "cpu":
        bandwidth = next(f.value for f in found if f.key == "device.memory_gb_per_s")
        facts["device.host_gb_per_s"] = _entry(
            "device.host_gb_per_s", bandwidth, f"{who}: host memory is device memory"
        )
        facts["links.intra_node.kind"] = Entry(value="loopback")
    else:
        link = next((f.value for f in found if f.key == "links.intra_node.gb_per_s"), 0.0)
        fast = "xgmi" if machine["generation"].startswith("cdna") else "nvlink"
        facts["links.intra_node.kind"] = Entry(
            value=fast if link > PCIE_5_GB_PER_S * 1e9 else "pcie"
        )
    return facts


def _who(ranks: int, machine: dict[str, Any]) -> str:
    processes = "process" if ranks == 1 else "processes"
    return f"{machine['name']}, {ranks} {processes} at once, torch {machine['torch']}"


def _entry(key: str, value: float, source: str) -> Entry:
    """Return a measured value in the file's unit, rounded to what repeats can tell."""
    scale = MACHINE_KEYS[key].scale if key in MACHINE_KEYS else Decimal(1)
    in_file = Decimal(value) / scale
    rounded = Decimal(f"{in_file:.{SIGNIFICANT_DIGITS}g}")
    return Entry(value=rounded, kind="measured", source=source)


def _machine(device: torch.device) -> dict[str, Any]:
    """Return what a machine says of itself, in SI."""
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    torch_version = torch.__version__.partition("+")[0]
    if device.type == "cpu":
        return {
            "name": _processor_name(),
            "generation": "cpu",
            "num_sms": 1,
            "memory": host / torch.distributed.get_world_size(),
            "usable_fraction": 0.99,
            "host_memory": host,
            "torch": torch_version,
        }
    properties = torch.cuda.get_device_properties(device)
    nominal = -(-properties.total_memory // GIB) * GIB  # a card is sold in whole GiB
    return {
        "name": properties.name,
        "generation": _generation(properties),
        "num_sms": properties.multi_processor_count,
        "memory": nominal,
        "usable_fraction": properties.total_memory / nominal,
        "host_memory": host,
        "torch": torch_version,
    }


def _generation(properties: Any) -> str:  # noqa: ANN401  (torch names no public type)
    if torch.version.hip is not None:
        return "cdna4" if properties.gcnArchName.startswith("gfx95") else "cdna3"
    if (properties.major, properties.minor) == _ADA:
        return "ada"
    return _GENERATION_OF_CAPABILITY.get(properties.major, "blackwell")


def _processor_name() -> str:
    """Return the processor's name, or the architecture where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (names[0] if names and names[0] else os.uname().machine)[:80]
