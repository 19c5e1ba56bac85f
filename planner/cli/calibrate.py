"""`planner calibrate`: measure this machine, or fit a profile to measured runs."""

import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from costmodels.hardware import HardwareProfile

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
    parser.add_argument(
        "--from",
        dest="table",
        type=Path,
        metavar="CSV",
        help="fit the constants of one machine to its measured runs instead of measuring",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="profile to write (TOML)")


def run(arguments: Namespace) -> int:
    """Measure or fit, and write the profile to a file or to stdout."""
    from costmodels.profiles.writer import profile_to_toml
    from planner.codec import encode
    from planner.files import refuse_unwritable, write_text

    if arguments.output:
        refuse_unwritable(arguments.output)  # now, not after minutes of measuring
    profile = _fitted(arguments.table) if arguments.table else _measured(arguments)
    text = profile_to_toml(profile)
    if arguments.output:
        write_text(arguments.output, text)
        _say(f"wrote {arguments.output}; use it with --hardware {arguments.output}")
    if arguments.json:
        print(json.dumps({"schema": 1, "profile": encode(profile)}))
    elif not arguments.output:
        print(text, end="")
    return 0


def _measured(arguments: Namespace) -> "HardwareProfile":
    from planner.cli import NoAnswerError
    from planner.cli.extras import runtime_module

    launch = runtime_module("runtime.launch", "calibrate")
    measure = runtime_module("runtime.measure.profile", "calibrate")
    try:
        profile: HardwareProfile = measure.measure_profile(arguments.device, arguments.ranks, _say)
    except launch.RankFailedError as error:
        cause = str(error).strip().splitlines()
        raise NoAnswerError(f"measuring failed: {cause[0]} {cause[-1]}") from error
    return profile


def _fitted(table: Path) -> "HardwareProfile":
    from planner.measured.fit_profile import fit_profile
    from planner.measured.validate import read_rows

    fitted = fit_profile(read_rows(table), progress=_say)
    _say(
        f"{fitted.num_runs} runs of {fitted.profile.name}: mean error {fitted.mean_error:.1%}, "
        f"{fitted.error_before:.1%} with its generation's constants"
    )
    for outlier in fitted.outliers:
        _say(f"  outlier: {outlier.run} is predicted {outlier.error:+.0%} off")
    return fitted.profile


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
