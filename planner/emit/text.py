"""Quoting: values as shell words, comments, TOML and YAML that mean themselves and nothing more.

YAML and TOML strings are written as JSON strings, which both languages read alike.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

Value = None | bool | int | float | str | Sequence["Value"] | Mapping[str, "Value"]

# A word of a command: as it is, or the name of an emitted file.
Word = str | PurePosixPath


def comment(text: str) -> str:
    """Return text that stays on the line of its comment and that no shell would read as more.

    Nothing in a comment runs; what looks like a command is still not copied out of a plan.
    """
    return re.sub(r"[^\w .,:;()+/=%@'-]+", " ", text).strip()


def identifier(text: str) -> str:
    """Return a name of letters, digits, dots and dashes, for job names and folders."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", text).strip("-.") or "model"


def shell_words(words: Sequence[Word]) -> str:
    """Return words as bash reads them; a path is that of a file beside the script, in HERE."""
    return " ".join(
        shlex.quote(word) if isinstance(word, str) else f'"$HERE"/{shlex.quote(str(word))}'
        for word in words
    )


def shell_options(options: Sequence[Sequence[Word]]) -> str:
    """Return options as lines of a bash array, one option with its values per line."""
    return "".join(f"  {shell_words(option)}\n" for option in options)


def toml_value(value: Value) -> str:
    """Return a TOML value: a boolean, a number, a string or a list of them.

    Raises:
        TypeError: The value is a table or null, which have no inline form here.

    """
    if value is None or isinstance(value, Mapping):
        raise TypeError(f"no inline TOML for {type(value).__name__}")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, Sequence):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return repr(value)


def yaml_text(value: Mapping[str, Value], indent: int = 0) -> str:
    """Return a block of YAML: nested mappings, scalars, lists of scalars, lists of mappings."""
    return "".join(_yaml_entry(key, item, indent) for key, item in value.items())


def _yaml_entry(key: str, value: Value, indent: int) -> str:
    pad = " " * indent
    if isinstance(value, Mapping) and value:
        return f"{pad}{key}:\n" + yaml_text(value, indent + 2)
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping):
        items = (yaml_text(item, indent + 2) for item in value if isinstance(item, Mapping))
        return f"{pad}{key}:\n" + "".join(f"{pad}- {item.lstrip()}" for item in items)
    return f"{pad}{key}: {_yaml_scalar(value)}\n"


def _yaml_scalar(value: Value) -> str:
    if isinstance(value, float):
        text = repr(value)
        return text if "." in text or "e" not in text else text.replace("e", ".0e")  # YAML 1.1
    return _quoted(value) if isinstance(value, str) else json.dumps(value)


def _quoted(text: str) -> str:
    """Return a JSON string; DEL and C1 controls are escaped too, since TOML forbids the first."""
    sound = text.encode("utf-8", "replace").decode()  # half of a surrogate pair becomes "?"
    escaped = json.dumps(sound, ensure_ascii=False)
    return re.sub(r"[\x7f-\x9f\u2028\u2029]", lambda found: f"\\u{ord(found[0]):04x}", escaped)
