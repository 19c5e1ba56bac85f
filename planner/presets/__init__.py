"""Models by name or file: what `--model` takes, turned into a ModelSpec.

a preset        llama-3.1-8b, or a plain size such as 8b      index.toml, configs/
a config        config.json of Hugging Face, or its folder    costmodels.hf_config
a model TOML    keys are the fields of ModelSpec              planner.presets.model_toml
package.module:function                                       recognised, not called: the
                                                              command line hands it to the runtime
"""

import difflib
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from costmodels.hf_config import spec_from_hf_config
from costmodels.model import ModelSpec
from planner.files import read_json, read_text
from planner.presets.model_toml import spec_from_toml

MAX_CONFIG_BYTES = 4 * 2**20  # chosen: published configs are kilobytes

_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A model that is built in.

    Attributes:
        name: What people call it; looked up in lower case.
        file: Its config, in `configs/`.
        source: Where the facts come from.
        plain_size: A second name such as "70b"; None without.

    """

    name: str
    file: str
    source: str
    plain_size: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that finds it, in lower case."""
        plain = () if self.plain_size is None else (self.plain_size,)
        return (self.name.lower(), *plain)


class ModelFunctionReference(ValueError):  # noqa: N818  # no failure: the caller may follow it
    """The model is `package.module:function`, which only the runtime may call.

    Attributes:
        module: The module to import.
        function: The function that returns an `nn.Module`.

    """

    def __init__(self, text: str) -> None:
        self.module, self.function = text.split(":")
        super().__init__(f"{text} is a function that builds a model; reading it needs the runtime")


def is_function_reference(text: str) -> bool:
    """Tell whether a text has the form `package.module:function`."""
    return _FUNCTION.fullmatch(text) is not None


@cache
def presets() -> tuple[Preset, ...]:
    """Return every built-in model, by name."""
    text = (resources.files(__package__) / "index.toml").read_text(encoding="utf-8")
    return tuple(Preset(**entry) for entry in tomllib.loads(text)["models"])


def read_model(text: str) -> ModelSpec:
    """Read the model that a person names.

    Args:
        text: A preset, a file or a folder. A preset's name wins over a file of that name.

    Raises:
        ModelFunctionReference: The text is `package.module:function`.
        ValueError: Nothing has that name, or the file cannot be read as a model.

    """
    for preset in presets():
        if text.lower() in preset.names:
            with resources.as_file(resources.files(__package__) / "configs") as folder:
                return _read_file(folder / preset.file, name=preset.name)
    if is_function_reference(text):
        raise ModelFunctionReference(text)
    path = Path(text)
    if not text.strip() or not _exists(path):
        raise ValueError(_unknown(text))
    if path.is_dir():
        return _read_file(path / "config.json", name=path.resolve().name)
    is_config = path.name == "config.json"
    return _read_file(path, name=path.resolve().parent.name if is_config else path.stem)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name no file system takes, a folder that may not be entered
        return False


def _read_file(path: Path, *, name: str) -> ModelSpec:
    """Read a config or a model TOML; a name inside a TOML wins over the file's."""
    if _exists(path) and not path.is_file():
        raise ValueError(f"{path} is no regular file")
    if _exists(path) and path.stat().st_size > MAX_CONFIG_BYTES:
        raise ValueError(f"{path} is larger than {MAX_CONFIG_BYTES // 2**20} MiB, no model config")
    if path.suffix == ".toml":
        return spec_from_toml(read_text(path), name=name, source=str(path))
    config = read_json(path)
    if not isinstance(config, dict):
        message = f"{path} must hold a JSON object, not a {type(config).__name__}"
        raise ValueError(message)  # noqa: TRY004  # users' input, for one exit status
    return spec_from_hf_config(config, name=name, source=str(path))


def _unknown(text: str) -> str:
    names = [name for preset in presets() for name in preset.names]
    close = difflib.get_close_matches(text.lower(), names, n=3)
    hint = f"; nearest: {', '.join(close)}" if close else ""
    return (
        f"no model {text[:200]!r}: there is no such file or folder, and it is none of the presets"
        f"{hint}; presets: {', '.join(sorted(names))}"
    )
