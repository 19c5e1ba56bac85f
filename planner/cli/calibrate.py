"""`planner calibrate`: measure this machine and write it as a hardware profile."""

import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

EXAMPLE = "planner calibrate --device cpu --ranks 4 -o cpu.toml"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the verb's flags."""
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="what to measure (default cpu)"
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=2,
        metavar="N",
        help="processes that work at once: as many as the jobs to be planned will have on a node "
        "(default 2)",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="profile to write (TOML)")


def run(arguments: Namespace) -> int:
    """Measure, fit, and write the profile to a file or to stdout."""
    from costmodels.profile_writer import profile_to_toml
    from planner.cli import NoAnswerError
    from planner.codec import encode
    from planner.files import write_text

    try:
        from runtime.launch import RankFailedError
        from runtime.measure.profile import measure_profile
    except ImportError as error:
        raise NoAnswerError("measuring needs PyTorch: pip install 'meshwright[runtime]'") from error
    try:
        profile = measure_profile(arguments.device, arguments.ranks, _say)
    except RankFailedError as error:
        cause = str(error).strip().splitlines()
        raise NoAnswerError(f"measuring failed: {cause[0]} {cause[-1]}") from error
    text = profile_to_toml(profile)
    if arguments.output:
        write_text(arguments.output, text)
        _say(f"wrote {arguments.output}; use it with --hardware {arguments.output}")
    if arguments.json:
        print(json.dumps({"schema": 1, "profile": encode(profile)}))
    elif not arguments.output:
        print(text, end="")
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
