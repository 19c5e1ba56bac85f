"""TOML from a HardwareProfile, with every source beside its number.

Reading the text gives an equal profile: numbers are shifted as decimals, never as floats. Constants
that stand as the generation has them are left out, so that a better fit of it reaches the file.
"""

import json
from collections.abc import Iterator
from decimal import Decimal

from costmodels.hardware import HardwareProfile, Link, Provenance
from costmodels.profiles.reader import SCHEMA, generation_constants
from costmodels.profiles.schema import MACHINE_KEYS


def profile_to_toml(profile: HardwareProfile) -> str:
    """Return the profile as TOML; `read_profile` of it equals `profile`."""
    sources = {p.key: p for p in profile.provenance}
    lines = [f"schema = {SCHEMA}"]
    table = ""
    for key, value in (*_machine_values(profile), *_own_constants(profile)):
        parent, _, name = key.rpartition(".")
        if parent != table:
            lines += ["", f"[{parent}]"]
            table = parent
        lines.append(f"{name} = {_value(value, sources.get(key))}")
    return "\n".join(lines) + "\n"


def _machine_values(profile: HardwareProfile) -> Iterator[tuple[str, object]]:
    device = profile.device
    values: dict[str, object] = {
        "name": profile.name,
        "generation": profile.generation,
        "device.name": device.name,
        "device.memory_gib": device.memory,
        "device.usable_fraction": device.usable_fraction,
        "device.memory_gb_per_s": device.memory_bandwidth,
        "device.num_sms": device.num_sms,
        "device.host_gb_per_s": device.host_bandwidth,
        "device.power_watts": device.power_watts,
        **{f"device.peak_tflops.{name}": peak for name, peak in device.peak_flops},
        "node.gpus_per_node": profile.gpus_per_node,
        "node.host_memory_gib": profile.host_memory,
        **_link_values(profile.intra_node),
        **_link_values(profile.inter_node),
    }
    spans_hosts = profile.intra_node.num_devices != profile.gpus_per_node
    if spans_hosts or any(p.key == "links.intra_node.devices" for p in profile.provenance):
        values["links.intra_node.devices"] = profile.intra_node.num_devices
    for key, kind in MACHINE_KEYS.items():
        value = values.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield key, _in_file(value, kind.scale)
        elif value is not None:
            yield key, value


def _in_file(value: float, scale: Decimal) -> Decimal:
    """Return a value in the file's unit, with no more digits than bring it back exactly."""
    exact = Decimal(repr(value)) / scale
    if isinstance(value, int):  # counts of bytes are rounded when they are read
        for digits in range(1, 28):
            short = Decimal(f"{exact:.{digits}g}")
            if round(short * scale) == value:
                return short
    return exact


def _link_values(link: Link) -> dict[str, object]:
    prefix = f"links.{link.name}."
    values: dict[str, object] = {
        "kind": link.kind,
        "gb_per_s": link.bandwidth,
        "latency_us": link.latency,
        "peer_access": link.peer_access,
    }
    return {prefix + name: value for name, value in values.items() if prefix + name in MACHINE_KEYS}


def _own_constants(profile: HardwareProfile) -> Iterator[tuple[str, Decimal]]:
    generation = generation_constants(profile.generation)
    sources = {p.key: p for p in profile.provenance}
    for name, value in profile.calibration.constants:
        source, entry = sources.get(f"constants.{name}"), generation[name]
        same_source = source is not None and (source.kind, source.source) == (
            entry.kind,
            entry.source,
        )
        number = entry.value
        if same_source and isinstance(number, int | Decimal) and float(number) == value:
            continue
        yield f"constants.{name}", Decimal(repr(value))


def _value(value: object, provenance: Provenance | None) -> str:
    text = _scalar(value)
    if provenance is None:
        return text
    fields = {"value": text, "kind": _scalar(provenance.kind), "source": _scalar(provenance.source)}
    for name in ("low", "high"):
        bound = getattr(provenance, name)
        if bound is not None:
            fields[name] = _scalar(Decimal(repr(bound)))
    return "{ " + ", ".join(f"{name} = {field}" for name, field in fields.items()) + " }"


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Decimal):
        return format(value.normalize(), "f")
    # JSON's escapes are TOML's, except that JSON leaves DEL as it is.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
