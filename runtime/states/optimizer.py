"""The optimizer step on a rank's pieces: schedule, clipping, update.

Works on segments (`buckets.py`): flat pieces of single parameters, so that weight decay and saved
states keep the parameters' names however the pieces are cut. Element-wise optimizers need no more.

    adamw       fp32 master weights and moments      Loshchilov and Hutter, arXiv:1711.05101
    adamw-bf16  weights and moments in the weights' own format
    sgd         no state

Norms and embeddings' positions (parameters of one dim) do not decay, as is usual since GPT-2.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from costmodels.job import Optimizer, Precision, TrainingJob
from runtime.states.buckets import Bucket, Segment
from runtime.states.zero import Precisions, ShardedStates

WEIGHT_DTYPES = {
    Precision.BF16: torch.bfloat16,
    Precision.FP32: torch.float32,
}
GRAD_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """What the plan does not say of an update. Defaults are chosen: common ones of the field.

    Attributes:
        kind: Which optimizer.
        learning_rate: Peak of the schedule.
        min_learning_rate: Where the cosine ends.
        num_warmup_steps: Steps of linear growth from 0.
        num_steps: Length of the schedule; 0 keeps the rate constant after the warm-up.
        max_norm: Gradients are scaled down to this global norm; None leaves them.

    """

    kind: Optimizer = Optimizer.ADAMW
    learning_rate: float = 3e-4
    min_learning_rate: float = 3e-5
    num_warmup_steps: int = 0
    num_steps: int = 0
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    max_norm: float | None = 1.0


def weight_dtype(job: TrainingJob) -> torch.dtype:
    """Return the format that weights compute in.

    Raises:
        ValueError: The runtime does not train in the job's precision.

    """
    if job.precision not in WEIGHT_DTYPES:
        known = ", ".join(sorted(WEIGHT_DTYPES))
        raise ValueError(
            f"the native runtime trains in {known}, not {job.precision} (the plan's precision)"
        )
    return WEIGHT_DTYPES[job.precision]


def precisions(job: TrainingJob) -> Precisions:
    """Return the formats of a job's states.

    Raises:
        ValueError: The runtime does not have the job's precision or optimizer.

    """
    weights = weight_dtype(job)
    if job.optimizer is Optimizer.ADAMW_8BIT:
        raise ValueError("the native runtime has adamw, adamw-bf16 and sgd, not adamw-8bit")
    return Precisions(
        gradients=GRAD_DTYPES[job.grad_dtype] if job.grad_dtype else torch.float32,
        master=torch.float32 if job.optimizer is Optimizer.ADAMW else weights,
    )


def learning_rate(settings: OptimizerSettings, step: int) -> float:
    """Return the rate of a step (from 0): linear warm-up, then half a cosine to the minimum."""
    if step < settings.num_warmup_steps:
        return settings.learning_rate * (step + 1) / settings.num_warmup_steps
    length = settings.num_steps - settings.num_warmup_steps
    if length <= 0:
        return settings.learning_rate
    done = min((step - settings.num_warmup_steps) / length, 1.0)
    drop = settings.learning_rate - settings.min_learning_rate
    return settings.min_learning_rate + drop * (1 + math.cos(math.pi * done)) / 2


class NotFiniteError(RuntimeError):
    """A gradient is no number, although the loss may be."""


class ShardedOptimizer:
    """Updates the pieces that a rank owns, then publishes them.

    Attributes:
        inner: torch's optimizer; its parameters are the segments' master pieces.

    """

    def __init__(
        self, states: ShardedStates, settings: OptimizerSettings, *, checks_norm: bool = False
    ) -> None:
        """Create the optimizer's states for the rank's pieces.

        Args:
            states: Weights and gradients.
            settings: What an update is.
            checks_norm: Refuse to update with a norm that is no number; waits for the device.

        """
        self._checks_norm = checks_norm
        self._states = states
        self._settings = settings
        decayed = [s.master for s in self.segments() if len(s.shard.global_shape) > 1]
        plain = [s.master for s in self.segments() if len(s.shard.global_shape) <= 1]
        groups = [
            {"params": decayed, "weight_decay": settings.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self.inner = _create([group for group in groups if group["params"]], settings)

    def step(self, step: int) -> Tensor:
        """Update the weights with the step's gradients, which are gone afterwards.

        Args:
            step: Index of the step from 0, for the schedule.

        Returns:
            The gradient's global norm before clipping.

        Raises:
            NotFiniteError: The norm is no number, and is checked; no rank updates anything.

        """
        norm = self._states.gradient_norm()
        if self._checks_norm and not torch.isfinite(norm):
            raise NotFiniteError(f"the gradient's norm is {norm.item()} in step {step}")
        limit = self._settings.max_norm
        if limit is not None:
            self._states.scale_gradients((limit / (norm + 1e-6)).clamp(max=1.0))
        for group in self.inner.param_groups:
            group["lr"] = learning_rate(self._settings, step)
        for bucket, segment in self._pieces():
            assert bucket.gradients is not None
            segment.master.grad = bucket.gradients[segment.place].to(segment.master)
        self.inner.step()
        for segment in self.segments():
            segment.master.grad = None
        self._states.clear_gradients()
        self._states.publish()
        return norm

    def create_states(self) -> None:
        """Create the states that the first step would, so that saved ones can be read into them."""
        if self._settings.kind is Optimizer.SGD:
            return
        for segment in self.segments():
            self.inner.state[segment.master] = {
                "step": torch.zeros((), dtype=torch.float32, device=segment.master.device),
                "exp_avg": torch.zeros_like(segment.master),
                "exp_avg_sq": torch.zeros_like(segment.master),
            }

    def resume(self, num_steps: int) -> None:
        """Go on after a number of steps; the other states have been read."""
        for state in self.inner.state.values():
            state["step"].fill_(num_steps)

    def segments(self) -> Iterator[Segment]:
        """Yield the rank's pieces in model order."""
        return (segment for _, segment in self._pieces())

    def _pieces(self) -> Iterator[tuple[Bucket, Segment]]:
        for bucket in self._states.buckets:
            for segment in bucket.segments:
                yield bucket, segment


def _create(groups: list[dict[str, object]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    if not groups:  # a rank may own padding only
        groups = [{"params": [torch.zeros(0)]}]
    if settings.kind is Optimizer.SGD:
        return torch.optim.SGD(groups, lr=settings.learning_rate, fused=True)
    return torch.optim.AdamW(
        groups,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        fused=True,
    )
