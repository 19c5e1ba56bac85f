"""HardwareProfile from TOML: `read_profile` by name or path, with overrides.

Constants are layered: a profile's `[constants]` over its generation's over
`generations/common.toml`, which names every constant there is. `costmodels.profiles.writer` writes
the same form.
"""

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import cast

import hardware_profiles
from costmodels.hardware import (
    Calibration,
    Device,
    HardwareProfile,
    Link,
    Provenance,
    make_cluster,
)
from costmodels.profiles.schema import (
    MACHINE_KEYS,
    PRECISIONS,
    STATED,
    TEXTS,
    Entry,
    Key,
    ValueType,
    check,
    checked_value,
    flatten,
    unknown_key,
)
from costmodels.units import MIB

__all__ = [
    "generation_constants",
    "make_cluster",  # what follows reading a profile
    "profile_entries",
    "profile_from_entries",
    "profile_from_toml",
    "profile_names",
    "profile_value",
    "read_profile",
]

SCHEMA = 1
MAX_FILE_BYTES = MIB  # a profile is a few KiB; anything near this is some other file
DEFAULT_USABLE = Entry(
    value=Decimal("0.99"), kind="chosen", source="about 1 % stays with the driver"
)
_CONSTANT = Key(type=ValueType.CONSTANT, required=False)


def profile_names() -> tuple[str, ...]:
    """Return the names of the built-in machines, sorted."""
    return hardware_profiles.profile_names()


def read_profile(name_or_path: str, overrides: Sequence[str] = ()) -> HardwareProfile:
    """Return a built-in machine by name, or one from a TOML file.

    Args:
        name_or_path: A name of `profile_names()`, or a path (it ends in .toml or has a separator).
        overrides: "KEY=VALUE" each, in the file's keys and units: "device.memory_gib=95".

    Raises:
        ValueError: Unknown name, unreadable file, or a key or value that no profile may have.

    """
    text, where = _profile_source(name_or_path)
    return profile_from_entries(_override(_parse(text, where), overrides), where)


def profile_entries(name_or_path: str) -> dict[str, Entry]:
    """Return what the file of a machine says, one entry per dotted key, in the file's units."""
    text, where = _profile_source(name_or_path)
    return _parse(text, where)


def profile_from_toml(
    text: str, where: str = "profile", overrides: Sequence[str] = ()
) -> HardwareProfile:
    """Return the machine that a TOML text describes; `where` opens error messages."""
    return profile_from_entries(_override(_parse(text, where), overrides), where)


def profile_value(text: str, key: str) -> float:
    """Return one number of a profile's TOML text by its dotted key, in the file's unit."""
    return float(cast("Decimal", _parse(text, "profile")[key].value))


def generation_constants(generation: str, where: str = "generation") -> dict[str, Entry]:
    """Return every constant of a generation by name: its own, else the common one.

    Raises:
        ValueError: No such generation, or its file names a constant that `common.toml` lacks.

    """
    known = hardware_profiles.generation_names()
    if generation not in known:
        raise ValueError(f"{where}: generation {generation!r} is none of: {', '.join(known)}")
    common = _constants(hardware_profiles.COMMON)
    own = _constants(generation)
    check(own, dict.fromkeys(common, _CONSTANT), f"generations/{generation}.toml")
    return common | own


def own_constants(file: str) -> dict[str, Entry]:
    """Return the constants that one generation's file, or `common`, states itself."""
    return _constants(file)


def _constants(file: str) -> dict[str, Entry]:
    where = f"generations/{file}.toml"
    entries = _parse(hardware_profiles.generation_text(file), where)
    for key, entry in entries.items():
        if not key.startswith("constants."):
            raise ValueError(f"{where}: only [constants] may stand here, not {key}")
        if entry.kind == STATED:
            raise ValueError(f"{where}: {key} needs a table with value, kind and source")
        checked_value(key, _CONSTANT, entry.value, where)
    return {key.removeprefix("constants."): entry for key, entry in entries.items()}


def _profile_source(name_or_path: str) -> tuple[str, str]:
    names = hardware_profiles.profile_names()
    if name_or_path in names:
        return hardware_profiles.profile_text(name_or_path), name_or_path
    if name_or_path.endswith(".toml") or "/" in name_or_path:
        return _read_file(Path(name_or_path)), name_or_path
    if "," in name_or_path:
        raise ValueError(
            f"--hardware takes one machine, not {name_or_path!r}: a job over different cards runs "
            "at the pace and in the memory of the smallest, so name that one"
        )
    near = difflib.get_close_matches(name_or_path, names, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise ValueError(
        f"unknown hardware {name_or_path!r}{hint}; built in: {', '.join(names)}; "
        "or give the path of a profile (.toml)"
    )


def _read_file(path: Path) -> str:
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path}: cannot be read: no regular file")  # it may never end
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ValueError(f"{path}: {size} bytes is too long for a profile")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text") from error


def _parse(text: str, where: str) -> dict[str, Entry]:
    try:
        tables = tomllib.loads(text, parse_float=Decimal)
    except (tomllib.TOMLDecodeError, InvalidOperation) as error:
        raise ValueError(f"{where}: not TOML: {error}") from error
    except (RecursionError, ValueError) as error:  # nesting, or an integer of 5,000 digits
        raise ValueError(
            f"{where}: not a profile: nested too deeply or too long a number"
        ) from error
    if tables.get("schema") != SCHEMA:
        raise ValueError(f"{where}: schema must be {SCHEMA}, not {tables.get('schema')!r}")
    return flatten(tables, where)


def _override(entries: dict[str, Entry], overrides: Iterable[str]) -> dict[str, Entry]:
    changed = dict(entries)
    settable = {k: v for k, v in MACHINE_KEYS.items() if v.type not in TEXTS}
    settable |= {f"constants.{name}": _CONSTANT for name in _constants(hardware_profiles.COMMON)}
    named: set[str] = set()
    for override in overrides:
        key, equals, text = override.partition("=")
        key, text = key.strip(), text.strip()
        if not equals:
            raise ValueError(f"--set {override}: the form is KEY=VALUE")
        if key in named:
            raise ValueError(f"--set {override}: {key} is set twice")
        named.add(key)
        if key not in settable:
            raise ValueError(f"--set {override}: {unknown_key(key, settable)}")
        changed[key] = Entry(
            value=_override_value(text, settable[key].type), source=f"--set {override}"
        )
        checked_value(key, settable[key], changed[key].value, f"--set {override}")
    return changed


def _override_value(text: str, type_: ValueType) -> object:
    if type_ is ValueType.FLAG:
        return {"true": True, "false": False}.get(text, text)
    try:
        return Decimal(text)
    except InvalidOperation:
        return text  # the check that follows names the key and what it takes


def profile_from_entries(entries: Mapping[str, Entry], where: str = "profile") -> HardwareProfile:
    """Return the machine that entries by dotted key describe, checked like a file's."""
    entries = {"device.usable_fraction": DEFAULT_USABLE, **entries}
    machine = {key: e for key, e in entries.items() if not key.startswith("constants.")}
    check(machine, MACHINE_KEYS, where)
    if not any(f"device.peak_tflops.{precision}" in machine for precision in PRECISIONS):
        raise ValueError(f"{where}: [device.peak_tflops] needs one of {', '.join(PRECISIONS)}")
    generation = generation_constants(str(machine["generation"].value), where)
    own = {key.removeprefix("constants."): e for key, e in entries.items() if key not in machine}
    check(own, dict.fromkeys(generation, _CONSTANT), f"{where}: [constants]")
    constants = generation | own
    return HardwareProfile(
        name=str(machine["name"].value),
        generation=str(machine["generation"].value),
        device=_device(machine),
        gpus_per_node=int(_si(machine, "node.gpus_per_node")),
        host_memory=round(_si(machine, "node.host_memory_gib")),
        intra_node=_link(machine, "intra_node"),
        inter_node=_link(machine, "inter_node"),
        calibration=Calibration(
            constants=tuple((name, float(_number(e))) for name, e in constants.items())
        ),
        provenance=_provenance(machine, constants),
    )


def _device(machine: Mapping[str, Entry]) -> Device:
    peaks = tuple(
        (precision, float(_si(machine, f"device.peak_tflops.{precision}")))
        for precision in PRECISIONS
        if f"device.peak_tflops.{precision}" in machine
    )
    power = "device.power_watts"
    return Device(
        name=str(machine["device.name"].value),
        memory=round(_si(machine, "device.memory_gib")),
        memory_bandwidth=float(_si(machine, "device.memory_gb_per_s")),
        peak_flops=peaks,
        num_sms=int(_si(machine, "device.num_sms")),
        host_bandwidth=float(_si(machine, "device.host_gb_per_s")),
        usable_fraction=float(_si(machine, "device.usable_fraction")),
        power_watts=float(_si(machine, power)) if power in machine else None,
    )


def _link(machine: Mapping[str, Entry], name: str) -> Link:
    prefix = f"links.{name}."
    intra = name == "intra_node"
    # One domain per host unless the file says that the fabric spans hosts.
    domain = prefix + "devices" if prefix + "devices" in machine else "node.gpus_per_node"
    return Link(
        name=name,
        kind=str(machine[prefix + "kind"].value),
        num_devices=int(_si(machine, domain)) if intra else 0,
        bandwidth=float(_si(machine, prefix + "gb_per_s")),
        latency=float(_si(machine, prefix + "latency_us")),
        peer_access=bool(machine[prefix + "peer_access"].value) if intra else True,
    )


def _provenance(
    machine: Mapping[str, Entry], constants: Mapping[str, Entry]
) -> tuple[Provenance, ...]:
    entries = {key: machine[key] for key in MACHINE_KEYS if key in machine}
    entries |= {f"constants.{name}": entry for name, entry in constants.items()}
    return tuple(
        Provenance(
            key=key,
            kind=entry.kind,
            source=entry.source,
            low=None if entry.low is None else float(entry.low),
            high=None if entry.high is None else float(entry.high),
        )
        for key, entry in entries.items()
        if entry.source  # texts and bare numbers have none
    )


def _number(entry: Entry) -> Decimal:
    return Decimal(cast("int | Decimal", entry.value))  # `check` saw to the type


def _si(machine: Mapping[str, Entry], key: str) -> Decimal:
    return _number(machine[key]) * MACHINE_KEYS[key].scale
