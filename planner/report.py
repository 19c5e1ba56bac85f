"""Text for people: one layout in full, many layouts as a table.

Machines get JSON (contract.py); nothing here computes, it only words and aligns.
"""

from collections.abc import Sequence

from costmodels.hardware import Cluster
from costmodels.job import TrainingJob
from costmodels.layout import Layout, Recompute
from costmodels.model import ModelSpec
from costmodels.parameters import num_active_parameters, num_parameters
from costmodels.terms import MemoryEstimate, TimeEstimate
from costmodels.units import GIB, TFLOP
from planner.contract import parts_gib
from planner.judge import Judgement

MILLION, BILLION = 10**6, 10**9

VERDICT_WORDS = {
    "fits": "fits",
    "at_risk": "at risk",
    "does_not_fit": "does not fit",
    "illegal": "illegal",
}


def layout_words(layout: Layout) -> str:
    """Return a layout in the short words of the command line: "tp8 pp2 dp4 zero1 mbs1 x16 1f1b"."""
    words = [f"tp{tensor_words(layout)}", f"pp{layout.pipeline_parallel}"]
    if layout.context_parallel > 1:
        words.append(f"cp{layout.context_parallel}-{layout.context_parallel_type}")
    if layout.expert_parallel > 1:
        words.append(f"ep{layout.expert_parallel}")
    if layout.expert_tensor_parallel > 1:
        words.append(f"etp{layout.expert_tensor_parallel}")
    words.append(f"dp{layout.data_parallel}")
    words.append(zero_words(layout))
    words.append(f"mbs{layout.micro_batch_size} x{layout.num_micro_batches}")
    words.append(recompute_words(layout))
    if layout.pipeline_parallel > 1:
        virtual = f" v{layout.stages_per_rank}" if layout.stages_per_rank > 1 else ""
        words.append(f"{layout.schedule}{virtual}")
    if layout.offload:
        words.append("offload " + "+".join(layout.offload))
    return "  ".join(words)


def tensor_words(layout: Layout) -> str:
    """Return the tensor-parallel degree, and that norms are not cut where that goes with it."""
    is_plain = layout.tensor_parallel > 1 and not layout.sequence_parallel
    return f"{layout.tensor_parallel}{' no-sp' if is_plain else ''}"


def zero_words(layout: Layout) -> str:
    """Return the ZeRO stage, with its group where states are copied across groups."""
    shards = layout.data_parallel * layout.context_parallel
    group = f"/{layout.zero_group}" if layout.zero_stage and layout.zero_group < shards else ""
    kept = " kept" if layout.keep_gathered else ""
    return f"zero{layout.zero_stage}{group}{kept}"


def recompute_words(layout: Layout) -> str:
    """Return what is recomputed, in a word or two."""
    if layout.recompute is Recompute.FULL and layout.recompute_layers:
        return f"recompute full/{layout.recompute_layers}"
    if layout.recompute is Recompute.SELECTIVE and layout.recompute_modules:
        return "recompute " + "+".join(layout.recompute_modules)
    return f"recompute {layout.recompute}"


def heading(model: ModelSpec, job: TrainingJob, cluster: Cluster) -> str:
    """Return the line that says what is asked."""
    return (
        f"{model.name}, {size_words(model)} parameters, on "
        f"{cluster.num_gpus} x {cluster.profile.name}; "
        f"{job.global_batch_size} sequence{'s' if job.global_batch_size > 1 else ''} of "
        f"{job.seq_len} tokens per step, "
        f"{', '.join((job.precision, job.optimizer, *_unusual(job)))}, target {job.target}"
    )


def _unusual(job: TrainingJob) -> list[str]:
    """Return what a job has that most have not."""
    words = {
        f"LoRA of rank {job.lora_rank}": job.lora_rank is not None,
        "unfused attention": not job.flash_attention,
        f"{job.grad_dtype} gradients": job.grad_dtype is not None,
        "chunked loss": job.chunked_loss,
        f"{job.memory_taken / GIB:g} GiB taken by others": job.memory_taken > 0,
    }
    return [word for word, holds in words.items() if holds]


def size_words(model: ModelSpec) -> str:
    """Return how many parameters a model has: "70.55 B", "46.70 B (12.88 B active)", "0.9 M"."""
    total, active = num_parameters(model), num_active_parameters(model)
    if total < BILLION / 10:
        return f"{total / MILLION:.1f} M"
    size = f"{total / BILLION:.2f} B"
    return size if active == total else f"{size} ({active / BILLION:.2f} B active)"


def judgement_text(
    judgement: Judgement, model: ModelSpec, job: TrainingJob, cluster: Cluster
) -> str:
    """Return everything there is to say of one layout."""
    lines = [heading(model, job, cluster), f"  {layout_words(judgement.layout)}", ""]
    lines.append(VERDICT_WORDS[judgement.verdict.value])
    lines += [f"  {violation.rule}: {violation.message}" for violation in judgement.violations]
    if judgement.memory is not None:
        lines += ["", *memory_lines(judgement.memory)]
    if judgement.time is not None:
        lines += ["", *time_lines(judgement.time, judgement.layout)]
    return "\n".join(lines)


def memory_lines(memory: MemoryEstimate) -> list[str]:
    """Return the memory of the fullest GPU by part, and of every pipeline rank."""
    parts = memory.parts
    low, high = (bound / GIB for bound in memory.reserved_interval)
    lines = [
        (
            f"memory of the fullest GPU (pipeline rank {memory.worst_rank}): "
            f"{parts.reserved / GIB:.1f} of {memory.capacity / GIB:.1f} GiB reserved "
            f"(80 %: {low:.1f} to {high:.1f}), {parts.allocated / GIB:.1f} allocated"
        )
    ]
    shown = {name: size for name, size in parts_gib(parts).items() if size > 0}
    ordered = sorted(shown.items(), key=lambda item: -item[1])
    lines += [f"  {name:<15} {size:>8.2f} GiB" for name, size in ordered]
    if len(memory.per_rank) > 1:
        per_rank = " ".join(f"{rank.allocated / GIB:.1f}" for rank in memory.per_rank)
        lines.append(f"  allocated by pipeline rank: {per_rank} GiB")
    if memory.host_per_node:
        lines.append(f"  host memory per node: {memory.host_per_node / GIB:.0f} GiB")
    return lines


def time_lines(time: TimeEstimate, layout: Layout) -> list[str]:
    """Return the step time by term, largest exposed part first."""
    low, high = time.interval
    lines = [
        (
            f"step {time.step_seconds:.3g} s (80 %: {low:.3g} to {high:.3g}), "
            f"{time.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, "
            f"{time.flops_per_gpu / TFLOP:.0f} TFLOP/s/GPU, MFU {100 * time.mfu:.1f} %"
        )
    ]
    ordered = sorted(time.terms, key=lambda term: -term.exposed_seconds)
    for term in ordered:
        if term.seconds <= 0 and term.exposed_seconds <= 0:
            continue
        hidden = term.seconds - term.exposed_seconds
        note = f"  ({hidden:.3g} s more hidden)" if hidden > 0.01 * term.seconds else ""
        name = f"{term.name} [{term.axis}]" if term.axis else term.name
        share = 100 * term.exposed_seconds / time.step_seconds
        lines.append(f"  {name:<24} {term.exposed_seconds:>10.4g} s {share:>5.1f} %{note}")
    if layout.pipeline_parallel > 1:
        lines.append(f"  pipeline bubble: {100 * time.bubble_fraction:.1f} % of the average rank")
    return lines


TITLES = (
    "#",
    "tp",
    "pp",
    "cp",
    "ep",
    "dp",
    "zero",
    "mbs",
    "acc",
    "recompute",
    "offload",
    "schedule",
    "verdict",
    "GiB",
    "tok/s/GPU",
    "MFU",
    "step s",
    "bubble",
    "exposed comm",
)


PLAIN = {"cp": "1", "ep": "1", "offload": "-"}  # what a column holds when it says nothing
LEFT_ALIGNED = frozenset({"recompute", "offload", "schedule", "verdict"})


def ranking_table(judgements: Sequence[Judgement]) -> list[str]:
    """Return the table people build by hand in threads: one row per layout, best first.

    Columns in which no layout differs from the plainest one are left out.
    """
    rows = [_cells(rank, judgement) for rank, judgement in enumerate(judgements, start=1)]
    shown = [
        column
        for column, title in enumerate(TITLES)
        if title not in PLAIN or any(row[column] != PLAIN[title] for row in rows)
    ]
    table = [[row[column] for column in shown] for row in (TITLES, *rows)]
    widths = [max(len(row[place]) for row in table) for place in range(len(shown))]
    return [
        "  ".join(
            cell.ljust(width) if TITLES[column] in LEFT_ALIGNED else cell.rjust(width)
            for cell, width, column in zip(row, widths, shown, strict=True)
        ).rstrip()
        for row in table
    ]


def _cells(rank: int, judgement: Judgement) -> tuple[str, ...]:
    layout, memory, time = judgement.layout, judgement.memory, judgement.time
    assert memory is not None
    assert time is not None
    schedule = "-"
    if layout.pipeline_parallel > 1:
        virtual = f" v{layout.stages_per_rank}" if layout.stages_per_rank > 1 else ""
        schedule = f"{layout.schedule}{virtual}"
    return (
        str(rank),
        tensor_words(layout),
        str(layout.pipeline_parallel),
        str(layout.context_parallel),
        str(layout.expert_parallel),
        str(layout.data_parallel),
        zero_words(layout).removeprefix("zero"),
        str(layout.micro_batch_size),
        str(layout.num_micro_batches),
        recompute_words(layout).removeprefix("recompute "),
        "+".join(layout.offload) or "-",
        schedule,
        VERDICT_WORDS[judgement.verdict.value],
        f"{memory.parts.reserved / GIB:.1f}",
        f"{time.tokens_per_second_per_gpu:,.0f}",
        f"{100 * time.mfu:.1f} %",
        f"{time.step_seconds:.3g}",
        f"{100 * time.bubble_fraction:.1f} %",
        f"{100 * time.exposed_communication_fraction:.1f} %",
    )
