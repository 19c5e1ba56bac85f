"""The flags of a training script: what the plan does not decide."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.states.optimizer import OptimizerSettings

AUTO, FRESH = "auto", "fresh"  # --resume, where it names no folder
MAX_TIMEOUT = 1e6  # s, 12 days. Chosen: stores and collectives count milliseconds in few bits


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """How long, on what, and where to.

    Attributes:
        steps: Optimizer steps in all, those before a resumed checkpoint included.
        data: Files and folders; empty means the standard library's sources.
        tokenizer: A `tokenizers` JSON file; None reads bytes.
        synthetic: Random tokens in place of data.
        save_every: Steps between checkpoints; 0 saves only when SIGTERM ends the run.
        keep: How many checkpoints stay; 0 keeps all.
        save_in_background: Training goes on while a checkpoint is written.
        output: Run folder.
        resume: Checkpoint to go on from; AUTO is the run folder's last one if there is any, FRESH
            begins anew.
        init_from: Hugging Face folder of first weights; a checkpoint that is resumed comes before.
        timeout: Seconds after which a silent rank or a stuck collective ends the run.
        bias_update_rate: What a step moves routers' corrections by; 0 leaves them.
        capacity_factor: What an expert takes of a sequence, over the mean; 0 drops nothing.
        trace: Steps to write into trace.json, after the warm-up; 0 writes none.
        check: Only look for what is wrong with plan, flags and data, in one process.
        device_type: "cpu" or "cuda"; None is what the plan is for, where the machine has it.

    """

    steps: int
    learning_rate: float
    min_learning_rate: float
    warmup_steps: int
    weight_decay: float
    max_norm: float
    seed: int
    data: tuple[Path, ...]
    tokenizer: Path | None
    synthetic: bool
    save_every: int
    output: Path
    keep: int
    save_in_background: bool
    resume: str
    init_from: Path | None
    timeout: float
    bias_update_rate: float
    capacity_factor: float
    trace: int
    check: bool
    device_type: str | None

    def optimizer_settings(self, defaults: OptimizerSettings) -> OptimizerSettings:
        """Return the optimizer's settings; `defaults` names its kind."""
        return OptimizerSettings(
            kind=defaults.kind,
            learning_rate=self.learning_rate,
            min_learning_rate=self.min_learning_rate,
            num_warmup_steps=self.warmup_steps,
            num_steps=self.steps,
            weight_decay=self.weight_decay,
            max_norm=self.max_norm or None,
        )


def parse_options(arguments: Sequence[str], folder: Path) -> TrainingOptions:
    """Read a training script's flags; the run folder is the script's by default.

    Wrong usage prints one message and ends the process with status 2.
    """
    parser = argparse.ArgumentParser(
        prog="train.py",
        description="Train the plan that lies beside this script.",
        epilog="example: bash launch.sh --steps 200 --data books/ --learning-rate 1e-3",
    )
    _add_optimizer_flags(parser)
    _add_data_flags(parser)
    _add_state_flags(parser)
    _add_run_flags(parser, folder)
    given = parser.parse_args(arguments)
    if given.synthetic and given.data:
        parser.error("--synthetic and --data exclude each other")
    if not 0 < given.timeout <= MAX_TIMEOUT:
        parser.error(f"--timeout must be above 0 and at most {MAX_TIMEOUT:.0f}")
    if given.min_learning_rate is None:
        given.min_learning_rate = given.learning_rate / 10
    given.data = tuple(given.data)
    return TrainingOptions(**vars(given))  # a flag per field, by its name


def _add_optimizer_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=_count, default=100, metavar="N", help="optimizer steps (100)")
    add("--learning-rate", type=_rate, default=3e-4, metavar="RATE", help="peak (3e-4)")
    add(
        "--min-learning-rate",
        type=_rate,
        default=None,
        metavar="RATE",
        help="at the end of the cosine (a tenth of the peak)",
    )
    add("--warmup-steps", type=_count, default=10, metavar="N", help="linear warm-up (10)")
    add("--weight-decay", type=_rate, default=0.1, metavar="X", help="of matrices (0.1)")
    add("--max-norm", type=_rate, default=1.0, metavar="X", help="clips gradients; 0 does not (1)")
    add(
        "--bias-update-rate",
        type=_rate,
        default=0.0,
        metavar="RATE",
        help="evens out experts by their routers' corrections (0: not; DeepSeek-V3: 0.001)",
    )
    add(
        "--capacity-factor",
        type=_rate,
        default=0.0,
        metavar="F",
        help="an expert takes up to F times the mean number of choices per expert of each sequence "
        "and drops the rest (0: takes all)",
    )


def _add_data_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seed", type=_count, default=0, metavar="N", help="of weights and samples (0)")
    add(
        "--data",
        type=Path,
        nargs="+",
        default=[],
        metavar="PATH",
        help="files or folders of text, .bin or .npy tokens (Python's own sources)",
    )
    add("--tokenizer", type=Path, metavar="FILE", help="tokenizers JSON file (bytes)")
    add("--synthetic", action="store_true", help="random tokens: for timing only")


def _add_state_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--save-every", type=_count, default=0, metavar="N", help="steps per checkpoint (0: none)")
    add("--keep", type=_count, default=2, metavar="N", help="checkpoints that stay, 0: all (2)")
    add("--save-in-background", action="store_true", help="train on while a checkpoint is written")
    add(
        "--resume",
        default=AUTO,
        metavar="FOLDER",
        help=f"checkpoint to go on from; {AUTO}: the run folder's last; {FRESH}: none ({AUTO})",
    )
    add("--init-from", type=Path, metavar="FOLDER", help="first weights: config and safetensors")


def _add_run_flags(parser: argparse.ArgumentParser, folder: Path) -> None:
    add = parser.add_argument
    add("--output", type=Path, default=folder, metavar="FOLDER", help="run folder (the script's)")
    add(
        "--timeout",
        type=_rate,
        default=300.0,
        metavar="SECONDS",
        help="ends a run whose ranks do not answer (300)",
    )
    add("--trace", type=_count, default=0, metavar="N", help="steps to draw in trace.json (0)")
    add("--check", action="store_true", help="read plan, flags and data, then stop")
    add(
        "--device",
        choices=("cpu", "cuda"),
        default=None,
        dest="device_type",
        help="(the plan's, if there is one)",
    )


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, not {text!r}")
    return value


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, not {text!r}")
    return value
