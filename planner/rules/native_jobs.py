"""What our own runtime of this version does not train, whatever the layout: `apply` refuses it.

The planner prices these jobs all the same; other targets may run them. The runtime refuses by
itself what it meets; what it would not notice (adapters, a loss in chunks) is refused only here.
"""

from costmodels.job import Optimizer, Precision, TrainingJob
from costmodels.model import ModelSpec

ARCHITECTURES = frozenset(
    {
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "mixtral",
        "qwen2_moe",
        "qwen3_moe",
        "deepseek_v2",
        "deepseek_v3",
        "gpt2",
    }
)
TRACED = "module"  # the architecture of a specification that describes a traced module
PRECISIONS = frozenset({Precision.BF16, Precision.FP32})
OPTIMIZERS = frozenset({Optimizer.ADAMW, Optimizer.ADAMW_BF16, Optimizer.SGD})


def job_refusals(
    model: ModelSpec, job: TrainingJob, *, has_module: bool = False
) -> tuple[str, ...]:
    """Return in words what the runtime lacks for a job; empty if it trains it.

    Args:
        model: The network.
        job: How it is trained.
        has_module: The function that builds a traced module is named beside its specification.

    """
    found = []
    if model.architecture == TRACED and not has_module:
        found.append(
            f"{model.name} is a module, which a plan cannot hold: name the function that builds it "
            "(--model package.module:function)"
        )
    if model.architecture not in (*ARCHITECTURES, TRACED):
        found.append(
            f"it has no module for architecture {model.architecture!r} ({model.name}); "
            f"it has {', '.join(sorted(ARCHITECTURES))}"
        )
    if job.precision not in PRECISIONS:
        found.append(f"it trains in {', '.join(sorted(PRECISIONS))}, not {job.precision}")
    if job.optimizer not in OPTIMIZERS:
        found.append(f"it has {', '.join(sorted(OPTIMIZERS))}, not {job.optimizer}")
    if job.lora_rank is not None:
        found.append(f"it trains whole models, no adapters (lora rank {job.lora_rank})")
    if job.chunked_loss:
        found.append("it holds the logits whole (--loss full)")
    if model.window is not None and job.seq_len > model.window:
        found.append(
            f"sequences of {job.seq_len} tokens are longer than the attention window of "
            f"{model.window}, which it does not cut"
        )
    return tuple(found)
