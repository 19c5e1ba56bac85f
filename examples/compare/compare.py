"""Predicted against measured, on this machine's processors.

Calibrates the machine, runs a sweep of layouts of a small model, predicts each and draws both:

    up to 2 ranks     real computation, a core for each rank
    4 and 8 ranks     computation replaced by sleeps of the predicted length: the ranks share
                      cores, so that only messages, overlap and pipelines can be judged

    python examples/compare/compare.py            all of it, about 20 minutes of a quiet machine
    python examples/compare/compare.py --try      a tiny model and few steps, to see it work
    python examples/compare/compare.py --draw     the figure again, from the measured rows

Rows are written to measured/, the figure to predicted_vs_measured.svg beside this script. Other
programs spoil the times: the load of the machine is written down with them.
"""

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parents[1]))  # the packages of this checkout

from layouts import real_layouts, sleeping_layouts  # noqa: E402
from sweep import Sweep, run_sweep  # noqa: E402

from costmodels.hardware import make_cluster  # noqa: E402
from costmodels.job import Precision, TrainingJob  # noqa: E402
from costmodels.profiles.reader import read_profile  # noqa: E402
from costmodels.profiles.writer import profile_to_toml  # noqa: E402
from costmodels.time.estimate import estimate_time  # noqa: E402
from planner.files import write_text  # noqa: E402
from planner.measured import sweeps as rows  # noqa: E402
from planner.measured.runs import MeasuredRun  # noqa: E402
from planner.plots.accuracy import runs_figure  # noqa: E402
from planner.plots.style import write_figure  # noqa: E402
from planner.presets import read_model  # noqa: E402
from runtime.measure.profile import measure_profile  # noqa: E402

COMMAND = "python examples/compare/compare.py"
FIGURE = "predicted_vs_measured.svg"
# Sleeping ranks leave the cores to the transfers beside them: overlap costs them nothing. A
# profile wants a number above zero.
SLEEPING_SLOWDOWN = "constants.overlap_slowdown=0.001"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is run."""

    model: str
    seq_len: int
    batch: int
    rounds: int


WHOLE = Scale(model="20m", seq_len=64, batch=16, rounds=4)
TRIAL = Scale(model="tiny", seq_len=32, batch=16, rounds=1)


def main() -> int:
    """Measure what is asked for, then draw all rows that there are."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", choices=(2, 4, 8), default=(2, 4, 8))
    parser.add_argument("--rounds", type=int, help=f"turns of each layout ({WHOLE.rounds})")
    parser.add_argument("--try", action="store_true", dest="is_trial", help="tiny and quick")
    parser.add_argument("--calibrated", action="store_true", help="use the profiles that stand")
    parser.add_argument("--draw", action="store_true", help="only draw and report")
    parser.add_argument("-o", "--output", type=Path, default=FOLDER, metavar="FOLDER")
    given = parser.parse_args()
    scale = TRIAL if given.is_trial else WHOLE
    for num_ranks in () if given.draw else given.ranks:
        measure(
            scale,
            num_ranks,
            given.rounds or scale.rounds,
            given.output,
            is_calibrated=given.calibrated,
        )
    return draw(given.output)


def measure(
    scale: Scale, num_ranks: int, rounds: int, folder: Path, *, is_calibrated: bool
) -> None:
    """Calibrate for a number of ranks, run their layouts and write the rows."""
    sleeps = num_ranks > (os.cpu_count() or 1)
    say(f"{num_ranks} ranks, {'sleeps' if sleeps else 'real computation'}")
    profile_path = folder / "measured" / f"cpu-{num_ranks}.toml"
    if not is_calibrated:
        calibrate(profile_path, num_ranks)
    profile = read_profile(str(profile_path), (SLEEPING_SLOWDOWN,) if sleeps else ())
    model = read_model(scale.model)
    job = TrainingJob(
        seq_len=scale.seq_len, global_batch_size=scale.batch, precision=Precision.FP32
    )
    cluster = make_cluster(profile, num_ranks)
    layouts = (
        real_layouts(model.num_layers, scale.batch)
        if num_ranks == 2  # noqa: PLR2004
        else sleeping_layouts(num_ranks, model.num_layers, scale.batch)
    )
    sweep = Sweep(
        model=model, job=job, cluster=cluster, layouts=tuple(layouts), sleeps=sleeps, rounds=rounds
    )
    loads = [os.getloadavg()[0]]
    seconds = run_sweep(sweep, say)
    loads.append(os.getloadavg()[0])
    swept = tuple(
        rows.SweptLayout(
            layout=layout,
            step_seconds=tuple(steps),
            slept_for=estimate_time(model, job, cluster, layout).step_seconds if sleeps else None,
        )
        for layout, steps in zip(layouts, seconds, strict=True)
    )
    record = rows.Sweep(
        command=f"{COMMAND} --ranks {num_ranks} --rounds {rounds}",
        conditions=f"{os.cpu_count()} cores, {num_ranks} ranks with one thread each; load "
        f"{loads[0]:.1f} before and {loads[1]:.1f} after; "
        f"{len(seconds[0])} steps of each layout in turns",
        model=model,
        job=job,
        cluster=cluster,
        layouts=swept,
    )
    rows.write_sweep(record, folder / "measured" / f"ranks-{num_ranks}.json")


def calibrate(path: Path, num_ranks: int) -> None:
    """Measure this machine with that many ranks at once and write its profile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, profile_to_toml(measure_profile("cpu", num_ranks, say)))


def draw(folder: Path) -> int:
    """Draw all measured rows, and print what they say."""
    paths = sorted((folder / "measured").glob("ranks-*.json"))
    if not paths:
        say(f"nothing measured in {folder / 'measured'}; run without --draw")
        return 1
    everything = []
    for path in paths:
        sweep = rows.read_sweep(path)
        runs = rows.runs_of(sweep)
        print(f"{path.name}: {sweep.conditions}")
        print(f"  {summary(runs)}")
        everything += runs
    write_figure(runs_figure(everything), folder / FIGURE)
    print(f"wrote {folder / FIGURE}")
    return 0


def summary(runs: list[MeasuredRun]) -> str:
    """Return error, order and noise of a sweep in one line."""
    tau, pairs = rows.clear_order(runs)
    noise = median((run.spread[1] - run.spread[0]) / run.measured for run in runs)
    return (
        f"{len(runs)} layouts, mean error {mean(abs(run.error) for run in runs):.1%}, bias "
        f"{median(run.error for run in runs):+.1%}, worst "
        f"{max((run.error for run in runs), key=abs):+.1%}; Kendall's tau {tau:.2f} over {pairs} "
        f"clear pairs; spread of repeats {noise:.1%}"
    )


def say(text: str) -> None:
    """Print progress."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
