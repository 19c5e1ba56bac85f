"""What a run measures of itself: one JSON line per step, a line to read, and a summary.

Lines go to `measured.jsonl.part`, which becomes `measured.jsonl` when the run has finished: a run
that died is never taken for a finished one.
"""

import json
import resource
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from costmodels.parameters import model_flops_per_token
from costmodels.units import GIB, KIB
from planner.plan import Plan

FINISHED = "measured.jsonl"
UNFINISHED = FINISHED + ".part"
WARM_UP_STEPS = 2  # first steps allocate and connect; they are recorded, the summary skips them


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One step as measured.

    Attributes:
        step: Index from 0.
        loss: Per token that counts, over the global batch.
        gradient_norm: Global 2-norm before clipping.
        mfu: Model FLOPs utilisation by the planner's convention; None without a peak.
        allocated_gib: Peak of the allocator on the fullest rank; None on CPUs.
        reserved_gib: Peak that the allocator took from the device (CPU: resident set of the
            process) on the fullest rank.
        expert_imbalance: How far the fullest expert of any layer lies above its layer's mean; None
            where routers are not evened out.
        dropped_share: Of the step's choices, what experts over their capacity dropped; None where
            they have none.

    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    step_seconds: float
    tokens_per_second_per_gpu: float
    mfu: float | None
    allocated_gib: float | None
    reserved_gib: float
    expert_imbalance: float | None = None
    dropped_share: float | None = None

    def line(self) -> str:
        """Return a line to read."""
        mfu = f"  mfu {100 * self.mfu:.1f} %" if self.mfu is not None else ""
        return (
            f"step {self.step:>6}  loss {self.loss:.4f}  norm {self.gradient_norm:.3f}  "
            f"lr {self.learning_rate:.2e}  {self.step_seconds:.3f} s  "
            f"{self.tokens_per_second_per_gpu:,.0f} tokens/s/GPU{mfu}  "
            f"{self.reserved_gib:.2f} GiB{self._experts()}"
        )

    def _experts(self) -> str:
        imbalance, dropped = self.expert_imbalance, self.dropped_share
        words = "" if imbalance is None else f"  fullest expert +{100 * imbalance:.0f} %"
        return words if dropped is None else f"{words}  dropped {100 * dropped:.2f} %"


class Recorder:
    """Writes a run's measurements; used by one rank."""

    def __init__(self, folder: Path, plan: Plan, *, resumed: bool = False) -> None:
        """Begin a new record in a folder, or go on with the one that stands there.

        Raises:
            ValueError: The folder cannot be written.

        """
        self._folder = folder
        self._plan = plan
        self._seconds: list[float] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / FINISHED).exists():
                (folder / FINISHED).replace(folder / UNFINISHED)
            self._file = (folder / UNFINISHED).open("a" if resumed else "w", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"cannot write {folder}: {error.strerror or error}") from error

    def record(self, measurement: Measurement) -> None:
        """Write one step and show it."""
        self._seconds.append(measurement.step_seconds)
        self._file.write(json.dumps(asdict(measurement), sort_keys=True) + "\n")
        self._file.flush()
        print(measurement.line(), file=sys.stderr)  # noqa: T201  (progress)

    def finish(self) -> str:
        """Mark the record as complete and return its summary."""
        self._file.close()
        (self._folder / UNFINISHED).replace(self._folder / FINISHED)
        seconds = self._seconds[WARM_UP_STEPS:] or self._seconds
        if not seconds:
            return "no steps were left to run"
        measured = statistics.median(seconds)
        return f"step {measured:.3f} s measured (median of {len(seconds)}){self._beside(measured)}"

    def _beside(self, measured: float) -> str:
        predicted = predicted_seconds(self._plan)
        if predicted is None:
            return ""
        return f", {predicted:.3f} s predicted ({100 * (predicted / measured - 1):+.0f} %)"


def predicted_seconds(plan: Plan) -> float | None:
    """Return the step time that the plan predicts, None where it holds no estimate."""
    time = plan.estimate.get("time")
    seconds = time.get("step_seconds") if isinstance(time, dict) else None
    return float(seconds) if isinstance(seconds, (int, float)) else None


def model_flops_utilisation(plan: Plan, seconds: float) -> float | None:
    """Return model FLOPs of a step over what the plan's devices could do in its time."""
    device = plan.cluster.profile.device
    peak = device.peak("bf16") or device.peak("fp16") or device.peak("fp32")
    if peak is None:
        return None
    flops = model_flops_per_token(plan.model, plan.job.seq_len) * plan.job.tokens_per_step
    return flops / seconds / plan.layout.num_gpus / peak


def peak_memory(device: torch.device) -> tuple[float, float]:
    """Return the peak GiB that tensors took and that the process took of the device.

    CPUs have no allocator to ask: both are the process's peak resident set.
    """
    if device.type == "cuda":
        allocated = torch.cuda.max_memory_allocated(device)
        return allocated / GIB, torch.cuda.max_memory_reserved(device) / GIB
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB  # Linux counts in KiB
    return resident / GIB, resident / GIB
