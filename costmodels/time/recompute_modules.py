"""Which modules of a layer selective recomputation runs again, and what share of each.

Modules are the `module` of ops (`costmodels.network.ops`); some targets have policies of several.
"""

from costmodels.job import TrainingJob
from costmodels.targets import BEHAVIOURS

# Shares of modules that named policies run again. torchtitan's "per-op" keeps the results of every
# second product and of attention, and makes the rest again; "every-2nd-layer" is full recompute of
# half the layers. Source: torchtitan/distributed/activation_checkpoint.py.
_POLICIES: dict[str, tuple[tuple[str, float], ...]] = {
    "per-op": (
        ("layernorm", 1.0),
        ("residual", 1.0),
        ("mlp", 0.5),
        ("attention", 0.5),
        ("tensor_parallel", 1.0),
    ),
    "every-2nd-layer": tuple(
        (module, 0.5)
        for module in (
            "layernorm",
            "residual",
            "mlp",
            "attention",
            "core_attn",
            "mla_up_proj",
            "moe",
            "moe_act",
            "tensor_parallel",
        )
    ),
    "moe": (("moe", 1.0), ("moe_act", 1.0)),
    "mlp": (("mlp", 1.0),),
}


def module_shares(job: TrainingJob, modules: tuple[str, ...]) -> tuple[tuple[str, float], ...]:
    """Return the modules that selective recomputation runs again, with the share of each."""
    names = modules or BEHAVIOURS[job.target].selective_modules
    return tuple(pair for name in names for pair in _POLICIES.get(name, ((name, 1.0),)))
