"""The contract with whoever reads our JSON: what `estimate` prints and `search` lists.

Scripts rely on these keys, their units and their meaning: keys may be added, none may change. GiB
and figures per GPU are made here and nowhere else; everything before is SI.
"""

import numpy as np

from costmodels.hardware import Cluster
from costmodels.job import TrainingJob
from costmodels.layout import Layout
from costmodels.model import ModelSpec
from costmodels.network.shard import padded_rows
from costmodels.parameters import num_active_parameters, num_parameters
from costmodels.terms import MemoryEstimate, MemoryParts, TimeEstimate
from costmodels.units import GIB, TFLOP
from planner.codec import Json, encode
from planner.judge import Judgement

SCHEMA = 1
PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "communication",
    "framework",
    "transient",
)


def judgement_json(
    judgement: Judgement, model: ModelSpec, job: TrainingJob, cluster: Cluster
) -> dict[str, Json]:
    """Return the contract's estimate object, floats rounded to 9 significant digits."""
    return {
        "schema": SCHEMA,
        "model": {
            "name": model.name,
            "num_parameters": num_parameters(model),
            "num_active_parameters": num_active_parameters(model),
            "padded_vocab_size": int(
                padded_rows(model, job.target, np.array(judgement.layout.tensor_parallel))
            ),
        },
        "hardware": {
            "name": cluster.profile.name,
            "gpus": cluster.num_gpus,
            "gpus_per_node": cluster.gpus_per_node,
        },
        "layout": layout_json(judgement.layout),
        "verdict": judgement.verdict.value,
        "violations": [encode(violation) for violation in judgement.violations],
        "memory": None if judgement.memory is None else memory_json(judgement.memory),
        "time": None if judgement.time is None else time_json(judgement.time),
    }


def layout_json(layout: Layout) -> dict[str, Json]:
    """Return the contract's layout object."""
    plain = encode(layout)
    assert isinstance(plain, dict)
    plain["offload"] = ",".join(part.value for part in layout.offload) or "none"
    return plain


def memory_json(memory: MemoryEstimate) -> dict[str, Json]:
    """Return the contract's memory object, in GiB."""
    parts = memory.parts
    low, high = memory.reserved_interval
    plain: dict[str, object] = {
        "capacity_gib": memory.capacity / GIB,
        "allocated_gib": parts.allocated / GIB,
        "reserved_gib": parts.reserved / GIB,
        "reserved_gib_interval": [low / GIB, high / GIB],
        "worst_stage": memory.worst_rank,
        "host_gib_per_node": memory.host_per_node / GIB,
        "load_peak_gib": memory.load_peak / GIB,
        "parts_gib": parts_gib(parts),
        "per_stage_gib": [rank.allocated / GIB for rank in memory.per_rank],
    }
    encoded = encode(plain)
    assert isinstance(encoded, dict)
    return encoded


def parts_gib(parts: MemoryParts) -> dict[str, float]:
    """Return the parts of one rank in GiB, in the contract's order."""
    return {name: getattr(parts, name) / GIB for name in PARTS}


def time_json(time: TimeEstimate) -> dict[str, Json]:
    """Return the contract's time object."""
    plain: dict[str, object] = {
        "step_seconds": time.step_seconds,
        "step_seconds_interval": list(time.interval),
        "tokens_per_second_per_gpu": time.tokens_per_second_per_gpu,
        "tflops_per_gpu": time.flops_per_gpu / TFLOP,
        "mfu": time.mfu,
        "bubble_fraction": time.bubble_fraction,
        "exposed_communication_fraction": time.exposed_communication_fraction,
        "terms": [encode(term) for term in time.terms],
    }
    encoded = encode(plain)
    assert isinstance(encoded, dict)
    return encoded
