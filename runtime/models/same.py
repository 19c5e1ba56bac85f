"""Whether weights of one model are weights of another: two specifications compared fact by fact."""

from dataclasses import fields, replace

from costmodels.model import ModelSpec
from planner.codec import Json, encode

# What may differ without another meaning of the weights.
_FREE = frozenset({"name", "training_seq_len", "num_mtp_layers"})


def differences(there: ModelSpec, here: ModelSpec) -> str:
    """Return in words how a model of a file differs from the plan's; empty if weights fit."""
    return "; ".join(
        f"{field.name} is {_plain(there, field.name)} there and {_plain(here, field.name)} here"
        for field in fields(ModelSpec)
        if field.name not in _FREE and _plain(there, field.name) != _plain(here, field.name)
    )


def _plain(model: ModelSpec, name: str) -> Json:
    value = getattr(model, name)
    if name == "moe" and value is not None:
        value = replace(value, balance_loss=0.0)  # how loads are evened out is the run's affair
    return encode(value)
