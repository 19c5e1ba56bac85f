"""Rows of measured runs as planner inputs: model, job, cluster and the layouts they may mean.

A row's blanks mean "not stated": each gets the planner's best assumption, said in the note. What
a row was measured at, where it comes from and which family it belongs to is never read here.
"""

from dataclasses import dataclass

from costmodels.hardware import Cluster
from costmodels.job import Precision, Switches, Target, TrainingJob
from costmodels.layout import Layout
from costmodels.model import ModelSpec
from costmodels.profiles.reader import make_cluster, read_profile
from planner.measured.columns import Row, UnsupportedRowError, integer, runs_on
from planner.measured.layouts import read_layouts
from planner.measured.models import read_model_columns

PROFILES = {
    "V100-SXM2-16GB": "v100-sxm2-16gb",
    "V100-SXM2-32GB": "v100-sxm2-32gb",
    "V100-SXM3-32GB": "v100-sxm3-32gb",
    "A100-SXM-40GB": "a100-sxm-40gb",
    "A100-SXM-80GB": "a100-sxm-80gb",
    "A800-SXM-80GB": "a800-sxm-80gb",
    "H100-SXM-80GB": "h100-sxm-80gb",
    "H100-SXM-94GB-500W": "h100-sxm-94gb",
    "H100-SXM-96GB-500W": "h100-sxm-96gb",
    "H200-SXM-141GB": "h200-sxm-141gb",
    "H800-SXM-80GB": "h800-sxm-80gb",
    "H20-96GB": "h20-96gb",
    "GH200-96GB": "gh200-96gb",
    "B200-SXM-180GB": "b200-sxm-180gb",
    "B300-SXM-270GB": "b300-sxm-270gb",
    "GB200-186GB": "gb200-nvl72",
    "GB300-288GB": "gb300-nvl72",
    "MI300X-192GB": "mi300x-192gb",
    "MI350X-288GB": "mi350x-288gb",
    "MI355X-288GB": "mi355x-288gb",
}

# Which rule table stands for which software, first match wins, with the reason. The table also
# says what a row's recomputation and stages mean (`layouts`), and the software what a silent row is
# taken to overlap (below). Neither selects a constant.
FRAMEWORKS = (
    ("megatron-deepspeed", Target.DEEPSPEED, "DeepSpeed owns states and gradients there"),
    ("deepspeed", Target.DEEPSPEED, "DeepSpeed owns states and gradients"),
    ("aa-scaling", Target.DEEPSPEED, "ZeRO-1 with 16-bit gradients, as DeepSpeed's bf16 mode"),
    ("internevo", Target.DEEPSPEED, "its own hybrid ZeRO keeps 16-bit gradients"),
    ("gpt-neox", Target.DEEPSPEED, "runs on DeepSpeed"),
    ("torchtitan", Target.TORCHTITAN, "itself"),
    ("jax", Target.MEGATRON, "Transformer Engine's kernels, as Megatron's"),
    ("fsdp", Target.ACCELERATE, "FSDP1 under another trainer"),
    ("flash-attention training", Target.ACCELERATE, "plain data parallelism in PyTorch"),
    ("nanotron", Target.NANOTRON, "itself"),
    ("picotron", Target.NANOTRON, "same authors, same design"),
    ("megatron", Target.MEGATRON, "Megatron's own"),
    ("libai", Target.MEGATRON, "Megatron's layouts in another framework"),
)

# Software whose published runs overlap tensor-parallel collectives with their products: NVIDIA's
# recipes (`tp_comm_overlap`), Megatron Core's tables, nanotron's `tp_linear_async_communication`.
OVERLAP_TENSOR_PARALLEL = ("nemo", "megatron-bridge", "megatron-core", "nanotron")

# Software whose gated feed-forward blocks are three layers: Aleph-Alpha/scaling,
# src/scaling/core/nn/mlp.py (`dense_in`, `siglu_weight`, each a ColumnParallelLinear).
SEPARATE_GATES = ("aa-scaling",)

# The log leaves it open. Where a part multiplies in 4 bits, tuned runs do: NVIDIA's own of MLPerf
# Training v5.1 (NVIDIA, November 2025), whose code and configurations the others run.
PRECISIONS = {"fp8|nvfp4": Precision.NVFP4}

UNFUSED_KERNELS = ("torch-softmax", "fused-softmax")

# Tags of gradients that are kept, or reduced, in fp32.
WIDE_GRADIENTS = frozenset({"grads-fp32", "grad-reduce-fp32"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredJob:
    """What a row asks.

    Attributes:
        layouts: What the row may mean, preferred first; one where everything is stated.
        note: The assumptions made.

    """

    model: ModelSpec
    job: TrainingJob
    cluster: Cluster
    layouts: tuple[Layout, ...]
    note: str


def interpret(row: Row) -> MeasuredJob:
    """Read one row.

    Raises:
        UnsupportedRowError: The planner cannot express it; the message says why.

    """
    notes: list[str] = []
    model = read_model_columns(row)
    cluster = _cluster(row)
    data_parallel = integer(row, "dp")
    batch = _global_batch(row, data_parallel, notes)
    job = _job(row, batch, notes)
    layouts = read_layouts(row, model, job, notes)
    return MeasuredJob(
        model=model, job=job, cluster=cluster, layouts=layouts, note="; ".join(notes)
    )


def target_of(framework: str) -> Target:
    """Return the rule table that stands for a framework; Megatron's where none is near."""
    name = framework.lower()
    return next((target for key, target, _ in FRAMEWORKS if key in name), Target.MEGATRON)


def _cluster(row: Row) -> Cluster:
    name = PROFILES.get(row["gpu"])
    if name is None:
        raise UnsupportedRowError(f"no profile for GPU {row['gpu']!r}")
    overrides = []
    if row["inter_node_gbps_per_gpu"]:
        gigabytes = float(row["inter_node_gbps_per_gpu"]) / 8
        overrides.append(f"links.inter_node.gb_per_s={gigabytes:g}")
    gpus, per_node = integer(row, "gpus"), integer(row, "gpus_per_node")
    try:
        profile = read_profile(name, tuple(overrides))
        return make_cluster(profile, gpus, min(gpus, per_node))
    except ValueError as error:
        raise UnsupportedRowError(str(error)) from error


def _global_batch(row: Row, data_parallel: int, notes: list[str]) -> int:
    if row["global_batch"]:
        return integer(row, "global_batch")
    accumulation = integer(row, "grad_accum", 1)
    notes.append("global batch from micro-batch, accumulation and replicas")
    return integer(row, "micro_batch", 1) * accumulation * data_parallel


def _job(row: Row, batch: int, notes: list[str]) -> TrainingJob:
    tags = frozenset(row["switches"].split())
    precision = PRECISIONS.get(row["precision"])
    if precision is None:
        family = row["precision"].partition("-")[0]
        if family not in {p.value for p in Precision}:
            raise UnsupportedRowError(f"precision {row['precision']!r}")
        precision = Precision(family)
    else:
        notes.append(f"precision {row['precision']} taken as {precision.value}")
    target = target_of(row["framework"])
    grad_dtype = "bf16" if "grads-bf16" in tags else "fp32" if tags & WIDE_GRADIENTS else None
    return TrainingJob(
        seq_len=integer(row, "seq_len"),
        global_batch_size=batch,
        precision=precision,
        flash_attention=row["flash"] != "0",
        grad_dtype=grad_dtype,
        target=target,
        switches=_switches(row, tags, target),
    )


def _reduces_beside_backward(row: Row, tags: frozenset[str], target: Target) -> bool:
    """Return whether gradients are reduced beside backward; software's defaults where silent.

    Megatron-LM does so when asked (`--overlap-grad-reduce`). DeepSpeed has no hooks for
    it in stage 1 (microsoft/DeepSpeed#1246), and `overlap_comm` is off below stage 3.
    """
    if "no-comm-overlap" in tags or row["framework"].lower().startswith("megatron-lm"):
        return False
    return target is not Target.DEEPSPEED or row["zero"].startswith("3")


def _overlaps_tensor_parallel(row: Row, tags: frozenset[str]) -> bool:
    """Return whether tensor-parallel collectives run in pieces beside their products."""
    return "no-comm-overlap" not in tags and runs_on(row, OVERLAP_TENSOR_PARALLEL)


def _switches(row: Row, tags: frozenset[str], target: Target) -> Switches:
    kernels = ("flash-2", "flash-1", *UNFUSED_KERNELS)
    default = "flash-2" if row["flash"] != "0" else "fused-softmax"
    kernel = next((tag for tag in kernels if tag in tags), default)
    # Silent rows are vendors' tuned runs, which send a token once per node.
    dispatchers = ("alltoall", "deepep", "hybridep")
    dispatch = next((tag for tag in dispatchers if tag in tags), "deepep")
    # Next to a stated kernel, what is not tagged as fused is not: norms, the loss.
    states_kernel = kernel in tags
    graphs = True if "cuda-graphs" in tags else False if "no-cuda-graphs" in tags else None
    return Switches(
        attention_kernel=kernel,
        fused_norm=not states_kernel or "fused-rmsnorm" in tags,
        fused_cross_entropy=not states_kernel or "fused-cross-entropy" in tags,
        overlap_grad_reduce=_reduces_beside_backward(row, tags, target),
        overlap_tensor_parallel="async-tp" in tags or _overlaps_tensor_parallel(row, tags),
        overlap_expert_parallel="ep-overlap" in tags,
        expert_dispatch=dispatch,
        cuda_graphs=graphs,
        compile=True if row["compile"] == "1" else False if row["compile"] == "0" else None,
        # Speed tables of expert models even their routing out, also where they do not say so.
        balanced_routing=True,
        rowwise_fp8="rowwise" in row["precision"],
        separate_gates=runs_on(row, SEPARATE_GATES),
        expandable_segments="expandable-segments" in tags,
        fp8_all_gather="fp8-all-gather" in tags,
        power_limited="power-limited" in tags,
    )
