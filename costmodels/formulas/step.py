"""Seconds of what happens once per step: the optimizer, and moving states to and from the host.

    update  = weights * bytes_per_weight / (memory_bandwidth * memory_efficiency)
    offload = (gradients down + weights up) / host_bandwidth + update on the host

Source: ZeRO-Offload, arXiv:2101.06840, section 4.1 (what crosses the bus).
"""

from sympy import Expr

from costmodels.formulas.compute import memory_bandwidth, memory_efficiency
from costmodels.formulas.functions import Formula
from costmodels.symbols import Quantity

weights = Quantity("weights", "1", "trained weights that this rank updates")
update_bytes = Quantity("update_bytes", "bytes", "read and written per weight by the optimizer")
host_bandwidth = Quantity("host_bandwidth", "bytes/s", "GPU to host memory, one direction")
host_update_rate = Quantity("host_update_rate", "bytes/s", "host memory per GPU for the optimizer")
transfer_bytes = Quantity("transfer_bytes", "bytes", "gradient down and weight up, per weight")


def device_update_seconds() -> Expr:
    """Return the time of the optimizer on the device: it is bound by memory."""
    return weights * update_bytes / (memory_bandwidth * memory_efficiency)


def host_update_seconds() -> Expr:
    """Return the time of the optimizer on the host, with both transfers."""
    return weights * (transfer_bytes / host_bandwidth + update_bytes / host_update_rate)


def formulas() -> tuple[Formula, ...]:
    """Return the formulas of this module."""
    return (
        Formula(
            name="device_update",
            summary="Seconds of the optimizer on the device.",
            results=(("seconds", device_update_seconds()),),
        ),
        Formula(
            name="host_update",
            summary="Seconds of the optimizer on the host, transfers included.",
            results=(("seconds", host_update_seconds()),),
        ),
    )
