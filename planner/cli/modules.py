"""`--model package.module:function`: the one form of a model that only the runtime can read."""

import argparse
import sys
from argparse import ArgumentParser
from typing import TYPE_CHECKING

from planner.cli.extras import runtime_module

if TYPE_CHECKING:
    from costmodels.model import ModelSpec


def add_module_flag(parser: ArgumentParser) -> None:
    """Add the flag of verbs that build what a plan of a traced module leaves out."""
    parser.add_argument(
        "--model",
        type=reference,
        dest="module",
        metavar="package.module:function",
        help="what builds the network, for a plan that was made of such a function",
    )


def reference(text: str) -> str:
    """Read `package.module:function` (an argparse type)."""
    from planner.presets import is_function_reference

    if not is_function_reference(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form package.module:function")
    return text


def traced_model(text: str, verb: str) -> "ModelSpec":
    """Trace the module that a function builds, and say which part each parameter plays.

    Raises:
        NoAnswerError: PyTorch is not installed.
        ValueError: There is no such function, or the planner cannot spread what it builds.

    """
    modules = runtime_module("runtime.any_module.modules", f"{verb} --model {text}")
    built = modules.build_module(text)
    description = built.describe()
    for line in (*description.lines(), *(f"warning: {text}" for text in built.warnings)):
        print(line, file=sys.stderr)
    spec: ModelSpec = description.spec
    return spec
