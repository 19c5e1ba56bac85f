"""Models, clusters and layouts that the planner's tests share."""

from typing import Any

from costmodels.hardware import Calibration, Cluster, Device, HardwareProfile, Link
from costmodels.job import TrainingJob
from costmodels.layout import Layout, split_layers
from costmodels.model import MixtureOfExperts, ModelSpec
from costmodels.units import GB, GIB, TFLOP, US


def profile(**device: Any) -> HardwareProfile:
    """A node of eight GPUs with round numbers."""
    known = {
        "name": "eight",
        "memory": 80 * GIB,
        "memory_bandwidth": 3000.0 * GB,
        "peak_flops": (("bf16", 1000.0 * TFLOP), ("fp8", 2000.0 * TFLOP), ("fp32", 60.0 * TFLOP)),
        "num_sms": 132,
        "host_bandwidth": 50.0 * GB,
    }
    return HardwareProfile(
        name="eight",
        generation="test",
        device=Device(**(known | device)),
        gpus_per_node=8,
        host_memory=2048 * GIB,
        intra_node=Link(
            name="intra_node", kind="nvlink", num_devices=8, bandwidth=450.0 * GB, latency=2 * US
        ),
        inter_node=Link(
            name="inter_node", kind="infiniband", num_devices=0, bandwidth=50.0 * GB, latency=5 * US
        ),
        calibration=Calibration(),
    )


def cluster(num_gpus: int, gpus_per_node: int = 8, **device: Any) -> Cluster:
    return Cluster(profile=profile(**device), num_gpus=num_gpus, gpus_per_node=gpus_per_node)


def model(**changed: Any) -> ModelSpec:
    """Qwen2.5-7B's shape: 28 heads, 4 key-value heads, 28 layers."""
    known: dict[str, Any] = {
        "name": "qwen-like",
        "architecture": "qwen2",
        "hidden_size": 3584,
        "num_layers": 28,
        "num_attention_heads": 28,
        "num_kv_heads": 4,
        "head_dim": 128,
        "ffn_hidden_size": 18944,
        "vocab_size": 152064,
        "training_seq_len": 32768,
    }
    return ModelSpec(**(known | changed))


def llama_8b(**changed: Any) -> ModelSpec:
    known: dict[str, Any] = {
        "name": "llama-like",
        "architecture": "llama",
        "hidden_size": 4096,
        "num_layers": 32,
        "num_attention_heads": 32,
        "num_kv_heads": 8,
        "ffn_hidden_size": 14336,
        "vocab_size": 128256,
    }
    return model(**(known | changed))


def mixtral(**changed: Any) -> ModelSpec:
    experts = MixtureOfExperts(num_experts=8, experts_per_token=2, ffn_hidden_size=14336)
    return llama_8b(
        **({"name": "mixtral-like", "architecture": "mixtral", "moe": experts} | changed)
    )


def job(**changed: Any) -> TrainingJob:
    known: dict[str, Any] = {"seq_len": 4096, "global_batch_size": 64}
    return TrainingJob(**(known | changed))


def layout(spec: ModelSpec, task: TrainingJob, gpus: int, **changed: Any) -> Layout:
    """A layout as the command line makes it: what is left out follows from the rest."""
    degree = {
        axis: changed.get(axis, 1)
        for axis in ("tensor_parallel", "pipeline_parallel", "context_parallel")
    }
    model_parallel = (
        degree["tensor_parallel"] * degree["pipeline_parallel"] * degree["context_parallel"]
    )
    data = changed.get("data_parallel", max(1, gpus // model_parallel))
    stages = degree["pipeline_parallel"] * changed.get("stages_per_rank", 1)
    derived: dict[str, Any] = {
        "data_parallel": data,
        "zero_group": data * degree["context_parallel"],
        "num_micro_batches": max(
            1, task.global_batch_size // (data * changed.get("micro_batch_size", 1))
        ),
        "layers_per_stage": split_layers(spec.num_layers, stages),
        "sequence_parallel": degree["tensor_parallel"] > 1,
    }
    return Layout(**(derived | changed))
