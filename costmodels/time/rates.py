"""Rates: what one GPU and its links sustain for one job, from a profile and its calibration.

The only reader of calibration constants on the way to seconds; `hardware_profiles/generations/
common.toml` says what each constant means and where its value comes from.
"""

from dataclasses import dataclass

from costmodels.hardware import HardwareProfile
from costmodels.job import Precision, Target, TrainingJob
from costmodels.memory.layer_parts import element_bytes
from costmodels.network.attention import attention_kernel

# Runtimes whose attention comes from Transformer Engine, which calls the generation's own kernel
# (cuDNN, FlashAttention-3). The others call FlashAttention-2 through PyTorch.
_NEWEST_ATTENTION = (Target.MEGATRON,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Sustained rates; FLOP/s, bytes/s and seconds.

    Attributes:
        element_bytes: Of an activation: 4 in fp32 jobs, 2 in all others.
        peak: FLOP/s of 16-bit products (fp32 in fp32 jobs), power limit heeded.
        low_peak: FLOP/s of the job's own precision; equal to `peak` in 16 bits.
        gemm_efficiency: Share of `peak` that large products sustain.
        low_gemm_efficiency: Share of `low_peak`.
        k_fill: Fill and drain of a tile in units of k, at `peak`; it takes the same time, so more
            k, at `low_peak`.
        tail_share: Share of the last wave's idle time that a product loses.
        host_launch: Seconds of the host per kernel; nothing when launches are replayed.
        all_to_all_share: Network bandwidth of all-to-alls relative to that of rings.
        misaligned: Rate of products whose rows do not start on 128-byte lines, relative.
        host_sync: Seconds for which the host waits where it must read a result of the device.
        module_launches: Host time of calling a layer's module, in kernel launches.
        imbalance: Spread of the experts' loads: the fullest rank, with e experts, carries
            1 + imbalance / sqrt(e) times the mean.
        host_update_rate: Bytes/s of host memory for the optimizer of one GPU's shard.

    """

    element_bytes: int
    peak: float
    low_peak: float
    gemm_efficiency: float
    low_gemm_efficiency: float
    k_fill: float
    num_sms: int
    tail_share: float
    memory_bandwidth: float
    memory_efficiency: float
    kernel_gap: float
    host_launch: float
    attention_forward: float
    attention_backward: float
    length_fill: float
    inner_bandwidth: float
    outer_bandwidth: float
    inner_latency: float
    outer_latency: float
    base_latency: float
    all_to_all_share: float
    overlap_slowdown: float
    imbalance: float
    casts: bool
    misaligned: float
    host_sync: float
    module_launches: float
    host_bandwidth: float
    host_update_rate: float

    @property
    def low_k_fill(self) -> float:
        """Fill and drain of a tile in the job's precision, in units of k."""
        relative = self.low_peak * self.low_gemm_efficiency / (self.peak * self.gemm_efficiency)
        return self.k_fill * relative


def rates_of(job: TrainingJob, profile: HardwareProfile) -> Rates:
    """Return what a device and its links sustain in a job.

    Raises:
        ValueError: The device does not compute in the job's precision.

    """
    constants, device = profile.calibration, profile.device
    power = _power_share(job, profile) ** constants["power_exponent"]
    base, low = _base_peak(job, profile), _low_peak(job, profile)
    efficiency = constants["gemm_efficiency"]
    relative = constants[f"{job.precision}_efficiency"] if low is not None else 1.0
    if job.precision is Precision.FP8 and job.switches.rowwise_fp8:
        relative *= constants["rowwise_fp8_share"]
    kernel = _kernel_share(job, profile)
    if job.precision is Precision.FP32:
        kernel *= constants["fp32_attention"]
    intra, inter = profile.intra_node, profile.inter_node
    staged = 1.0 if intra.peer_access else constants["host_staging_share"]
    return Rates(
        element_bytes=element_bytes(job),
        peak=base * power,
        low_peak=(low if low is not None else base) * power,
        gemm_efficiency=efficiency,
        low_gemm_efficiency=efficiency * relative,
        k_fill=constants["k_fill"],
        num_sms=device.num_sms,
        tail_share=constants["tail_share"],
        memory_bandwidth=device.memory_bandwidth,
        memory_efficiency=constants["memory_efficiency"],
        kernel_gap=constants["kernel_gap"],
        host_launch=0.0 if job.switches.cuda_graphs else constants["host_launch"],
        attention_forward=constants["attention_forward"] * kernel,
        attention_backward=constants["attention_backward"] * kernel,
        length_fill=constants["length_fill"],
        inner_bandwidth=intra.bandwidth * staged * constants["intra_node_efficiency"],
        outer_bandwidth=inter.bandwidth * constants["inter_node_efficiency"],
        inner_latency=intra.latency,
        outer_latency=inter.latency,
        base_latency=constants["collective_start"],
        all_to_all_share=constants["all_to_all_share"],
        overlap_slowdown=constants["overlap_slowdown"],
        imbalance=0.0 if job.switches.balanced_routing else constants["routing_imbalance"],
        casts=low is not None,
        misaligned=constants["misaligned_share"],
        module_launches=constants["module_launches"],
        host_sync=0.0 if job.switches.cuda_graphs else constants["host_sync"],
        host_bandwidth=device.host_bandwidth,
        host_update_rate=constants["host_update_rate"],
    )


def _kernel_share(job: TrainingJob, profile: HardwareProfile) -> float:
    """Return the rate of the job's attention kernel relative to the generation's newest."""
    constants = profile.calibration
    if attention_kernel(job) == "flash-1":
        return constants["flash_2_share"] * constants["flash_1_share"]
    return 1.0 if job.target in _NEWEST_ATTENTION else constants["flash_2_share"]


def _power_share(job: TrainingJob, profile: HardwareProfile) -> float:
    """Return the power that the board may draw, relative to the generation's full part."""
    share = profile.calibration["limited_power_share"] if job.switches.power_limited else 1.0
    if profile.device.power_watts is not None:
        full = profile.calibration["full_power_watts"]
        share *= min(profile.device.power_watts / full, 1.0)
    return share


def _base_peak(job: TrainingJob, profile: HardwareProfile) -> float:
    """Return the peak of everything that low precision leaves alone."""
    names = ("fp32",) if job.precision is Precision.FP32 else _sixteen_bit(job)
    for name in names:
        peak = profile.device.peak(name)
        if peak is not None:
            return peak
    raise ValueError(f"{profile.name} does not compute in {names[0]}: no peak_tflops.{names[0]}")


def _sixteen_bit(job: TrainingJob) -> tuple[str, ...]:
    return ("fp16", "bf16") if job.precision is Precision.FP16 else ("bf16", "fp16")


def _low_peak(job: TrainingJob, profile: HardwareProfile) -> float | None:
    """Return the peak of the job's 8-bit or 4-bit products; None in wider jobs."""
    if job.precision in (Precision.BF16, Precision.FP16, Precision.FP32):
        return None
    peak = profile.device.peak(job.precision)
    if peak is None:
        raise ValueError(f"{profile.name} has no {job.precision} products in its profile")
    return peak
