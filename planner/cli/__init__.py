"""The command line: one module per verb, imported only when its verb runs.

Results go to stdout, progress and messages to stderr. Exit status: 0 done, 1 no answer,
2 wrong usage or unreadable input. This package alone joins the planner and the runtime.
"""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from planner import __version__

VERBS = {
    "search": "find the best layouts for a model on a cluster",
    "estimate": "judge one layout: legal? fits? how fast? why?",
    "apply": "lower a plan to something that runs",
    "verify": "dry-run every rank role of a plan and compare it with its estimate",
    "plot": "draw predicted against measured, breakdowns, pipeline timelines, scaling",
    "explain": "why this plan; why not another; what if",
    "validate": "predict every row of a table of measured runs",
    "calibrate": "measure this machine, or fit a profile to measured rows",
    "models": "list the models that are built in",
    "hardware": "list the hardware profiles that are built in",
}

NO_ANSWER = 1
WRONG_USAGE = 2
INTERRUPTED = 130


class NoAnswerError(Exception):
    """The question was understood and the answer is no; the message says why. Exit status 1."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    verb = next((word for word in words if not word.startswith("-")), None)
    try:
        return _run(verb, words)
    except BrokenPipeError:  # the reader left
        _drop_output()
        return 0
    except OSError as error:
        if error.filename is None:  # stdout has no name
            _drop_output()
            error = OSError(f"cannot write the output: {error.strerror or error}")
        return _complain(verb, str(error), WRONG_USAGE, as_json="--json" in words)
    except (NoAnswerError, ValueError, KeyboardInterrupt) as error:
        status, message = NO_ANSWER, str(error)
        if isinstance(error, ValueError):
            status = WRONG_USAGE
        elif isinstance(error, KeyboardInterrupt):
            status, message = INTERRUPTED, "interrupted"
        return _complain(verb, message, status, as_json="--json" in words)


def _run(verb: str | None, words: Sequence[str]) -> int:
    module = _verb_module(verb) if verb in VERBS else None
    arguments = _parser(verb, module).parse_args(words)
    assert module is not None  # argparse refuses every other verb
    status = int(module.run(arguments))
    if sys.stdout is not None:  # closed by the caller
        sys.stdout.flush()  # a full disk or a reader that left shows here, not at exit
    return status


def _drop_output() -> None:
    """Send the rest of stdout nowhere; Python would complain again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _verb_module(verb: str | None) -> ModuleType:
    return importlib.import_module(f"planner.cli.{verb}")


def _parser(verb: str | None, module: ModuleType | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="planner",
        description="Finds the fastest way to spread an LLM training run over GPUs, "
        "shows why, and runs it with PyTorch.",
        epilog="example: planner search --gpus 64 --model 70b -o plan.json",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"planner {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, summary in VERBS.items():
        epilog = module.EXAMPLE if module and name == verb else None
        sub = verbs.add_parser(
            name,
            help=summary,
            description=_sentence(summary),
            epilog=epilog and f"example: {epilog}",
            allow_abbrev=False,
        )
        if module and name == verb:
            module.add_arguments(sub)
            sub.add_argument("--json", action="store_true", help="machine output on stdout")
    return parser


def _sentence(summary: str) -> str:
    return summary[0].upper() + summary[1:] + ("" if summary.endswith("?") else ".")


def _complain(verb: str | None, message: str, status: int, *, as_json: bool) -> int:
    print(f"planner {verb}: {message}", file=sys.stderr)
    if as_json:
        print(json.dumps({"error": message}))
    return status
