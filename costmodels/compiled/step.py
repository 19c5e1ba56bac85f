"""Generated from costmodels.formulas.step by costmodels.compile. Do not edit."""
# fmt: off

from typing import Any, NamedTuple

import numpy as np

Value = Any  # a float or an array that broadcasts with the other arguments


class DeviceUpdate(NamedTuple):
    """Results of device_update."""

    seconds: Value


def device_update(*, memory_bandwidth: Value, memory_efficiency: Value, update_bytes: Value, weights: Value) -> DeviceUpdate:
    """Seconds of the optimizer on the device."""
    return DeviceUpdate(
        seconds=update_bytes*weights/(memory_bandwidth*memory_efficiency),
    )


class HostUpdate(NamedTuple):
    """Results of host_update."""

    seconds: Value


def host_update(*, host_bandwidth: Value, host_update_rate: Value, transfer_bytes: Value, update_bytes: Value, weights: Value) -> HostUpdate:
    """Seconds of the optimizer on the host, transfers included."""
    return HostUpdate(
        seconds=weights*(update_bytes/host_update_rate + transfer_bytes/host_bandwidth),
    )
