"""What becomes of a layout when the length, the batch or the number of GPUs changes.

The layout stays as it is, but for data parallelism and micro-batches, which follow: the answers say
what breaks in a run that somebody changes by hand, not what a new search would find.
"""

from dataclasses import dataclass, replace

from costmodels.hardware import Cluster, make_cluster
from costmodels.job import TrainingJob
from costmodels.layout import Layout
from costmodels.memory.estimate import estimate_memory
from costmodels.model import ModelSpec
from costmodels.units import GIB
from planner.judge import Judgement, Verdict, judge, memory_verdict
from planner.rules.rule import sequence_multiple

LENGTHS = (1.25, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0)  # chosen: shares of the job's length that are tried
SAME = 0.005  # chosen: half a per cent of speed is no change


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """One change, and what it does to the layout.

    Attributes:
        change: What changes: "seq_len", "global_batch_size" or "gpus".
        value: Its new value.
        verdict: Of the layout then.
        says: The same in words.

    """

    change: str
    value: int
    verdict: str
    says: str


def refitted(layout: Layout, job: TrainingJob, cluster: Cluster) -> Layout:
    """Return a layout with data parallel and micro-batches derived again."""
    others = layout.tensor_parallel * layout.pipeline_parallel * layout.context_parallel
    data_parallel = max(1, cluster.num_gpus // others)
    shards = data_parallel * layout.context_parallel
    per_forward = data_parallel * layout.micro_batch_size
    return replace(
        layout,
        data_parallel=data_parallel,
        zero_group=layout.zero_group if data_parallel == layout.data_parallel else shards,
        num_micro_batches=max(1, job.global_batch_size // per_forward),
    )


def margins(
    model: ModelSpec, job: TrainingJob, cluster: Cluster, plan: Judgement
) -> tuple[Margin, ...]:
    """Return what longer sequences, another batch and other numbers of GPUs do to a plan."""
    found = [_of_length(model, job, cluster, plan.layout)]
    step = plan.layout.data_parallel * plan.layout.micro_batch_size
    for batch in (job.global_batch_size // 2 // step * step, 2 * job.global_batch_size):
        if batch not in (0, job.global_batch_size):
            changed = replace(job, global_batch_size=batch)
            said = judge(model, changed, cluster, refitted(plan.layout, changed, cluster))
            words = _compared(plan, said, f"a batch of {batch}")
            found.append(_margin("global_batch_size", batch, said, words))
    for gpus in _other_counts(cluster):
        other = make_cluster(cluster.profile, gpus, min(cluster.gpus_per_node, gpus))
        said = judge(model, job, other, refitted(plan.layout, job, other))
        words = _compared(plan, said, "1 GPU" if gpus == 1 else f"{gpus} GPUs")
        found.append(_margin("gpus", gpus, said, words))
    return tuple(margin for margin in found if margin is not None)


def _other_counts(cluster: Cluster) -> tuple[int, ...]:
    """Return half and twice the GPUs, above one node in whole nodes (down, and up)."""
    node, half, twice = cluster.gpus_per_node, cluster.num_gpus // 2, 2 * cluster.num_gpus
    fewer = half if half <= node else half // node * node
    more = twice if twice <= node else -(-twice // node) * node
    return tuple(count for count in (fewer, more) if count)


def _margin(change: str, value: int, said: Judgement, words: str) -> Margin:
    return Margin(change=change, value=value, verdict=said.verdict.value, says=words)


def _of_length(
    model: ModelSpec, job: TrainingJob, cluster: Cluster, layout: Layout
) -> Margin | None:
    """Try longer sequences, each micro-batch of as many of them, until memory ends."""
    unit = sequence_multiple(layout)
    last, verdict = job.seq_len, Verdict.FITS
    for share in LENGTHS:
        length = int(job.seq_len * share) // unit * unit
        memory = estimate_memory(model, replace(job, seq_len=length), cluster, layout)
        verdict = memory_verdict(memory, cluster)
        if verdict is not Verdict.FITS:
            needs = f"{memory.parts.reserved / GIB:.1f} of {memory.capacity / GIB:.1f} GiB"
            fits = f"{last} tokens fit" if last > job.seq_len else "no more tokens fit safely"
            words = f"{fits}; sequences of {length} need {needs}"
            return Margin(change="seq_len", value=length, verdict=verdict.value, says=words)
        last = length
    words = f"sequences of {last} tokens still fit"
    return Margin(change="seq_len", value=last, verdict=verdict.value, says=words)


def _compared(plan: Judgement, said: Judgement, what: str) -> str:
    """Return how fast a GPU is after the change, or why it is not."""
    if said.verdict is Verdict.ILLEGAL:
        return f"{what}: not with this layout ({said.violations[0].rule})"
    assert plan.time is not None
    assert said.time is not None
    assert said.memory is not None
    if not said.runs:
        needs = f"{said.memory.parts.reserved / GIB:.1f} of {said.memory.capacity / GIB:.1f} GiB"
        return f"{what}: does not fit ({needs})"
    faster = said.time.tokens_per_second_per_gpu / plan.time.tokens_per_second_per_gpu - 1
    speed = "as fast per GPU"
    if abs(faster) > SAME:
        speed = f"{100 * abs(faster):.0f} % {'faster' if faster > 0 else 'slower'} per GPU"
    risk = ", at risk of running out of memory" if said.verdict is Verdict.AT_RISK else ""
    return f"{what}: {speed}{risk}"
