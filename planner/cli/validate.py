"""`planner validate`: predict every row of a table of measured runs and report the error."""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path

from planner.cli import NoAnswerError
from planner.cli.values import positive

EXAMPLE = "planner validate measured.csv -o predicted.csv"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the verb's flags."""
    parser.add_argument("table", type=Path, metavar="CSV", help="measured runs")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="rows with predictions")
    parser.add_argument(
        "--worst", type=positive, metavar="N", help="list only the N families that err most"
    )
    parser.add_argument(
        "--leave-out",
        choices=("family", "gpu"),
        help="refit without each group and predict it; adds leave_out_ columns. What is not fitted "
        "stays: gemm_efficiency and tail_share of A100 were chosen on all its runs",
    )


def run(arguments: Namespace) -> int:
    """Predict, write the rows and print the error table on stderr."""
    from planner.files import refuse_unwritable, write_text
    from planner.measured.errors import error_table
    from planner.measured.validate import csv_text, predict_all, read_rows

    if arguments.output:
        refuse_unwritable(arguments.output)  # now, not after all rows are predicted
    rows = read_rows(arguments.table)
    if not rows:
        raise NoAnswerError(f"{arguments.table} has a header and no row to predict")
    done = predict_all(rows, progress=_progress(len(rows)))
    if arguments.leave_out:
        from planner.measured.fit import predict_left_out

        done = predict_left_out(done, arguments.leave_out, progress=_say)
    if arguments.output:
        write_text(arguments.output, csv_text(done))
    if arguments.json:
        for row in done:
            print(json.dumps(row))
    elif not arguments.output:
        sys.stdout.write(csv_text(done))
    print(error_table(done, arguments.worst), file=sys.stderr)
    return 0


def _progress(total: int) -> Callable[[int], None]:
    every = 200  # rows between two signs of life

    def show(number: int) -> None:
        if sys.stderr.isatty() and (number % every == 0 or number == total):
            print(f"\r{number} of {total} rows", end="", file=sys.stderr, flush=True)

    return show


def _say(text: str) -> None:
    print(text, file=sys.stderr)
