"""What needs an extra: imported when a verb runs, named where it is missing."""

import importlib
from types import ModuleType

from planner.cli import NoAnswerError


def runtime_module(name: str, verb: str) -> ModuleType:
    """Import a module of the runtime.

    Raises:
        NoAnswerError: PyTorch is not installed; the message says how to get it.

    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "safetensors"):
            raise
        raise NoAnswerError(f"{verb} needs PyTorch: pip install 'meshwright[runtime]'") from error
