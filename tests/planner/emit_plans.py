"""Plans for the emitters' tests: a layout of a preset on a profile, data parallelism derived."""

from dataclasses import dataclass, replace

from costmodels.hardware import Cluster
from costmodels.job import Target, TrainingJob
from costmodels.layout import Layout, split_layers
from costmodels.model import ModelSpec
from costmodels.profiles.reader import make_cluster, read_profile
from planner.emit import Emission
from planner.presets import read_model


@dataclass(frozen=True, kw_only=True)
class Planned:
    model: ModelSpec
    job: TrainingJob
    cluster: Cluster
    layout: Layout


def planned(
    model: str = "8b",
    gpus: int = 8,
    *,
    hardware: str = "h100-sxm-80gb",
    batch: int = 64,
    job: dict | None = None,
    **layout: object,
) -> Planned:
    spec = read_model(model)
    cluster = make_cluster(read_profile(hardware), gpus)
    degrees = {
        axis: int(layout.get(axis, 1))
        for axis in ("tensor_parallel", "context_parallel", "pipeline_parallel")
    }
    split = 1
    for degree in degrees.values():
        split *= degree
    data = gpus // split
    stages = degrees["pipeline_parallel"] * int(layout.get("stages_per_rank", 1))
    micro = int(layout.get("micro_batch_size", 1))
    derived = {
        "data_parallel": data,
        "zero_group": data * degrees["context_parallel"],
        "num_micro_batches": batch // (micro * data),
        "layers_per_stage": split_layers(spec.num_layers, stages),
        "sequence_parallel": degrees["tensor_parallel"] > 1,
    }
    sizes = {"seq_len": 4096, "global_batch_size": batch} | (job or {})
    return Planned(
        model=spec,
        job=TrainingJob(**sizes),
        cluster=cluster,
        layout=Layout(**(derived | layout)),
    )


def renamed(plan: Planned, name: str) -> Planned:
    return replace(plan, model=replace(plan.model, name=name))


def file_of(emission: Emission, path: str) -> str:
    return {file.path: file.text for file in emission.files}[path]


# One plan that each target can say; the golden files hold what they become.
SAMPLES: dict[Target, Planned] = {
    Target.MEGATRON: planned(
        "70b",
        64,
        tensor_parallel=8,
        pipeline_parallel=4,
        zero_stage=1,
        layers_per_stage=(19, 21, 21, 19),
    ),
    Target.TORCHTITAN: planned("8b", 16, tensor_parallel=2, pipeline_parallel=2, zero_stage=3),
    Target.DEEPSPEED: planned("mixtral-8x7b", 16, zero_stage=3),
    Target.NANOTRON: planned(
        "7b", 16, tensor_parallel=2, pipeline_parallel=2, zero_stage=1, layers_per_stage=(17, 15)
    ),
    Target.ACCELERATE: planned("qwen3-8b", 16, tensor_parallel=2, context_parallel=2, zero_stage=3),
}
