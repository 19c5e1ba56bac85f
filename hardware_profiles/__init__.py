"""Machines as data: one TOML per machine, with a source on every number.

The folder holds `<machine>.toml`; `generations/<generation>.toml` holds the constants that a data
sheet does not tell, and `generations/common.toml` names every such constant with its meaning and
the value that holds where a generation says nothing. Parsing is `costmodels.profiles.reader`.
"""

from importlib.resources import files

COMMON = "common"


def profile_names() -> tuple[str, ...]:
    """Return the names of the built-in machines, sorted."""
    return _toml_names("")


def generation_names() -> tuple[str, ...]:
    """Return the names of the device generations, sorted; `common` is not one."""
    return tuple(name for name in _toml_names("generations") if name != COMMON)


def profile_text(name: str) -> str:
    """Return the TOML of a built-in machine; `name` is one of `profile_names()`."""
    return (files(__name__) / f"{name}.toml").read_text(encoding="utf-8")


def generation_text(name: str) -> str:
    """Return the TOML of a generation, or of `common`."""
    return (files(__name__) / "generations" / f"{name}.toml").read_text(encoding="utf-8")


def _toml_names(folder: str) -> tuple[str, ...]:
    entries = (files(__name__) / folder).iterdir() if folder else files(__name__).iterdir()
    suffix = ".toml"
    return tuple(sorted(e.name.removesuffix(suffix) for e in entries if e.name.endswith(suffix)))
