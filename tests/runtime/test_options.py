"""Flags of a training script."""

from pathlib import Path

import pytest

from costmodels.job import Optimizer
from runtime.states.optimizer import OptimizerSettings
from runtime.training.options import parse_options

FOLDER = Path("run")


def test_defaults_train_a_hundred_steps_beside_the_script():
    options = parse_options([], FOLDER)
    assert (options.steps, options.save_every, options.output) == (100, 0, FOLDER)
    assert options.data == ()
    assert options.min_learning_rate == pytest.approx(options.learning_rate / 10)


def test_flags_reach_the_optimizer():
    arguments = "--steps 50 --learning-rate 0.01 --warmup-steps 5 --max-norm 0 --weight-decay 0.2"
    options = parse_options(arguments.split(), FOLDER)
    settings = options.optimizer_settings(OptimizerSettings(kind=Optimizer.SGD))
    assert settings == OptimizerSettings(
        kind=Optimizer.SGD,
        learning_rate=0.01,
        min_learning_rate=0.001,
        num_warmup_steps=5,
        num_steps=50,
        weight_decay=0.2,
        max_norm=None,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "-1"], "must be a whole number of at least 0, not '-1'"),
        (["--steps", "1.5"], "must be a whole number of at least 0, not '1.5'"),
        (["--learning-rate", "nan"], "must be a number of at least 0, not 'nan'"),
        (["--learning-rate", "inf"], "must be a number of at least 0, not 'inf'"),
        (["--timeout", "0"], "--timeout must be above 0"),
        (["--timeout", "1e300"], "--timeout must be above 0 and at most 1000000"),
        (["--synthetic", "--data", "x"], "--synthetic and --data exclude each other"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_wrong_flags_end_with_status_2_and_one_message(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_options(arguments, FOLDER)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
