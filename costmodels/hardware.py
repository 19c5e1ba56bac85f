"""HardwareProfile: one machine as data; Cluster: that machine times a number of GPUs.

Profiles are the TOML files of `hardware_profiles`; every number there names its source.
Units in files: memory_gib, gb_per_s (per GPU, one direction), latency_us, peak_tflops (dense).
Everything here is SI: bytes, bytes/s, seconds, FLOP/s.
"""

import math
from dataclasses import dataclass, field

from costmodels.config_keys import MAX_COUNT

# Constants that the cost model divides by: rates, and shares of rates.
_DIVISORS = frozenset(
    {
        "all_to_all_share",
        "attention_backward",
        "attention_forward",
        "flash_1_share",
        "flash_2_share",
        "fp32_attention",
        "fp8_efficiency",
        "full_power_watts",
        "gemm_efficiency",
        "host_staging_share",
        "host_update_rate",
        "inter_node_efficiency",
        "intra_node_efficiency",
        "limited_power_share",
        "memory_efficiency",
        "misaligned_share",
        "mxfp8_efficiency",
        "nvfp4_efficiency",
        "rowwise_fp8_share",
    }
)
_MAX_CONSTANT = 1e15  # chosen: far beyond every constant; products of two stay finite


def _require_positive(record: object, *names: str) -> None:
    """Refuse fields that are not finite and above 0: records also come from strangers' plans."""
    for name in names:
        value = getattr(record, name)
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be positive and finite, not {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One tier of the interconnect.

    Attributes:
        name: "intra_node" or "inter_node".
        kind: "nvlink", "xgmi", "pcie", "infiniband", "ethernet", "shared-memory" ...
        num_devices: GPUs that reach each other over this tier; 0 for all of the cluster.
        bandwidth: Bytes/s per GPU, one direction.
        latency: Seconds of one hop of a small message.
        peer_access: GPUs read each other's memory directly; otherwise through the host.

    """

    name: str
    kind: str
    num_devices: int
    bandwidth: float
    latency: float
    peer_access: bool = True

    def __post_init__(self) -> None:
        """Refuse links that carry nothing."""
        _require_positive(self, "bandwidth")
        if not (math.isfinite(self.latency) and self.latency >= 0 and self.num_devices >= 0):
            raise ValueError(f"{self.name}: latency and num_devices must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU (or one CPU process).

    Attributes:
        memory: Nominal bytes; the driver keeps about 1 % (`Cluster.usable_memory`).
        memory_bandwidth: Bytes/s of HBM or DRAM.
        peak_flops: Dense FLOP/s per precision name; missing means not supported.
        num_sms: Streaming multiprocessors (compute units), for wave quantisation.
        host_bandwidth: Bytes/s to host memory, one direction (offload).
        usable_fraction: Share of `memory` that the driver leaves to processes.
        power_watts: Board power limit; None where nobody states one.

    """

    name: str
    memory: int
    memory_bandwidth: float
    peak_flops: tuple[tuple[str, float], ...]
    num_sms: int
    host_bandwidth: float
    usable_fraction: float = 0.99
    power_watts: float | None = None

    def __post_init__(self) -> None:
        """Refuse devices without memory, speed or a precision."""
        _require_positive(
            self, "memory", "memory_bandwidth", "num_sms", "host_bandwidth", "usable_fraction"
        )
        if self.power_watts is not None:
            _require_positive(self, "power_watts")
        if self.usable_fraction > 1:
            raise ValueError(f"usable_fraction must be at most 1, not {self.usable_fraction}")
        if not self.peak_flops or any(not 0 < peak < math.inf for _, peak in self.peak_flops):
            raise ValueError("peak_flops needs a positive figure for at least one precision")

    def peak(self, precision: str) -> float | None:
        """Return dense FLOP/s in a precision, None where the part lacks it."""
        return dict(self.peak_flops).get(precision)


class MissingConstantError(KeyError, ValueError):
    """A profile, perhaps inside a plan of another version, lacks a constant of the cost model."""

    def __str__(self) -> str:
        """Return one message for people; KeyError alone would print the bare key."""
        return (
            f"the machine's calibration has no constant {self.args[0]!r}; a plan or profile of "
            "another version of the planner lacks it: make it anew"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The handful of physical constants that a data sheet does not tell.

    All are per device or per generation; each has a source in the profile or generation file.
    Owned by the cost model: fields are added where the model needs them.
    """

    constants: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        """Refuse constants that no machine has."""
        for name, value in self.constants:
            if not 0 <= value <= _MAX_CONSTANT or (value == 0 and name in _DIVISORS):
                least = "above 0" if name in _DIVISORS else "at least 0"
                limits = f"{least} and at most {_MAX_CONSTANT:g}"
                raise ValueError(f"the constant {name} must be {limits}, not {value:g}")

    def __getitem__(self, key: str) -> float:
        """Return a constant.

        Raises:
            MissingConstantError: There is none of that name.

        """
        found = dict(self.constants).get(key)
        if found is None:
            raise MissingConstantError(key)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where one number of a profile comes from.

    Attributes:
        key: Its dotted key in the file, such as "device.memory_gib".
        kind: "datasheet", "measured", "fitted", "chosen", or "stated" where the file has no more.
        source: Document, data or reason.
        low: Smallest plausible value in the file's unit, where one is known.
        high: Largest plausible value.

    """

    key: str
    kind: str
    source: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """A kind of machine.

    Attributes:
        generation: Names the constants that hold where the device has no data of its own.
        gpus_per_node: GPUs that share a host.
        host_memory: Bytes of DRAM per node.
        provenance: Sources of the numbers that name one, in the order of the file format.

    """

    name: str
    generation: str
    device: Device
    gpus_per_node: int
    host_memory: int
    intra_node: Link
    inter_node: Link
    calibration: Calibration
    provenance: tuple[Provenance, ...] = field(default=(), hash=False)

    def __post_init__(self) -> None:
        """Refuse nodes without GPUs or memory."""
        _require_positive(self, "gpus_per_node", "host_memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A number of GPUs of one profile.

    Attributes:
        gpus_per_node: GPUs that share a host in this cluster.

    """

    profile: HardwareProfile
    num_gpus: int
    gpus_per_node: int

    def __post_init__(self) -> None:
        """Refuse clusters without GPUs."""
        _require_positive(self, "num_gpus", "gpus_per_node")
        if self.num_gpus > MAX_COUNT:
            raise ValueError(f"num_gpus must be at most {MAX_COUNT}, not {self.num_gpus}")

    @property
    def num_nodes(self) -> int:
        """Hosts of the cluster; one may be partly filled."""
        return -(-self.num_gpus // self.gpus_per_node)

    @property
    def usable_memory(self) -> float:
        """Bytes of one GPU that the driver leaves to processes."""
        return usable_memory(self.profile)

    @property
    def scale_up_size(self) -> int:
        """GPUs of one NVLink (or PCIe) domain: the node, or more where the fabric spans hosts."""
        spans_hosts = self.profile.intra_node.num_devices > self.profile.gpus_per_node
        if spans_hosts and self.gpus_per_node <= self.profile.gpus_per_node:
            return self.profile.intra_node.num_devices
        return self.gpus_per_node


def usable_memory(profile: HardwareProfile) -> float:
    """Return the bytes of one GPU that the driver leaves to processes, about 1 % under nominal."""
    return profile.device.memory * profile.device.usable_fraction


def make_cluster(
    profile: HardwareProfile, num_gpus: int, gpus_per_node: int | None = None
) -> Cluster:
    """Return a cluster of whole nodes, or of one node that may be partly filled.

    Args:
        profile: The machine.
        num_gpus: GPUs in all.
        gpus_per_node: GPUs that share a host; None takes the profile's.

    Raises:
        ValueError: A count below 1, or more than one node and not whole nodes.

    """
    origin = "--gpus-per-node"
    if gpus_per_node is None:
        gpus_per_node, origin = profile.gpus_per_node, f"profile {profile.name}"
    for name, value in (("gpus", num_gpus), ("gpus_per_node", gpus_per_node)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    if num_gpus > gpus_per_node and num_gpus % gpus_per_node:
        below = num_gpus - num_gpus % gpus_per_node
        raise ValueError(
            f"gpus = {num_gpus} is not a multiple of gpus_per_node = {gpus_per_node} ({origin}), "
            f"as it must be above one node; nearest legal: {below} or {below + gpus_per_node}"
        )
    return Cluster(profile=profile, num_gpus=num_gpus, gpus_per_node=gpus_per_node)
