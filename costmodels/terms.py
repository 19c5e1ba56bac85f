"""What an estimate says: terms and parts stay apart to the end, totals are properties.

Seconds and bytes throughout; conversion to GiB happens where results are printed.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One cause of step time on the rank that paces the step.

    Attributes:
        name: "matmul", "attention", "memory_bound", "launch", "optimizer", "bubble",
            "tp_collectives", "grad_reduce", "param_gather", "p2p", "cp_attention", "ep_dispatch",
            "loss" ... one name per cause.
        axis: "tp", "cp", "dp", "pp", "ep" for communication; None for local work.
        seconds: Time that the work takes by itself.
        exposed_seconds: Part that nothing hides; these sum to the step.

    """

    name: str
    axis: str | None
    seconds: float
    exposed_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Bytes of one rank at its worst moment, by part.

    All but `communication` (NCCL) and `framework` (context, fragmentation) are the allocator's.
    """

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    transient: float = 0.0
    communication: float = 0.0
    framework: float = 0.0

    @property
    def allocated(self) -> float:
        """Bytes that the framework's allocator holds."""
        return self.reserved - self.communication - self.framework

    @property
    def reserved(self) -> float:
        """Bytes to compare with the card."""
        # Written out: a search asks for it hundreds of thousands of times.
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.activations
            + self.logits
            + self.transient
            + self.communication
            + self.framework
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Memory of the fullest rank.

    Attributes:
        capacity: Bytes that the driver leaves.
        worst_rank: Pipeline rank that is fullest.
        per_rank: Parts of one rank of each pipeline position.
        reserved_interval: 80 % interval of the fullest rank's reserved bytes.
        host_per_node: Host bytes that offload takes on each node.
        load_peak: Bytes of a GPU while weights are loaded.

    """

    capacity: float
    worst_rank: int
    per_rank: tuple[MemoryParts, ...]
    reserved_interval: tuple[float, float]
    host_per_node: float
    load_peak: float

    @property
    def parts(self) -> MemoryParts:
        """Parts of the fullest rank."""
        return self.per_rank[self.worst_rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeEstimate:
    """Time of one optimizer step.

    Attributes:
        terms: Causes; their exposed seconds sum to the step.
        interval: 80 % interval of the step in seconds.
        tokens: Tokens of the step, over all GPUs.
        model_flops: FLOPs of the step by the contract's convention, over all GPUs.
        peak_flops: FLOP/s of one GPU that MFU divides by.
        bubble_fraction: Idle seconds of the average rank over step seconds, whatever it waits for.
            The terms tell apart what transfers make it wait ("p2p") and the rest ("bubble").

    """

    terms: tuple[Term, ...]
    interval: tuple[float, float]
    tokens: int
    model_flops: float
    peak_flops: float
    num_gpus: int
    bubble_fraction: float

    @property
    def step_seconds(self) -> float:
        """Seconds of the step."""
        return sum(term.exposed_seconds for term in self.terms)

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Throughput of one GPU."""
        return self.tokens / self.step_seconds / self.num_gpus

    @property
    def flops_per_gpu(self) -> float:
        """Model FLOP/s of one GPU."""
        return self.model_flops / self.step_seconds / self.num_gpus

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation."""
        return self.flops_per_gpu / self.peak_flops

    @property
    def exposed_communication_fraction(self) -> float:
        """Share of the step in which nothing but communication happens."""
        exposed = sum(t.exposed_seconds for t in self.terms if t.axis is not None)
        return exposed / self.step_seconds
