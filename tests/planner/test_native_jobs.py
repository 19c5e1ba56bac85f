"""What the native runtime does not train is refused by name before anything is written."""

from dataclasses import replace

import pytest

from costmodels.job import Optimizer, Precision, TrainingJob
from planner.presets import presets, read_model
from planner.rules.native_jobs import ARCHITECTURES, OPTIMIZERS, PRECISIONS, job_refusals

JOB = TrainingJob(seq_len=1024, global_batch_size=8)


def test_a_plain_job_is_trained():
    assert job_refusals(read_model("8b"), JOB) == ()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"precision": Precision.FP8}, "fp8"),
        ({"optimizer": Optimizer.ADAMW_8BIT}, "adamw-8bit"),
        ({"lora_rank": 8}, "lora rank 8"),
        ({"chunked_loss": True}, "--loss full"),
    ],
)
def test_what_is_missing_is_named(change, word):
    (reason,) = job_refusals(read_model("8b"), replace(JOB, **change))
    assert word in reason


def test_a_window_shorter_than_the_sequence_is_named():
    mistral = read_model("mistral-7b-v0.1")
    assert job_refusals(mistral, JOB) == ()
    (reason,) = job_refusals(mistral, replace(JOB, seq_len=8192))
    assert "4096" in reason


def test_the_tables_are_those_of_the_runtime():
    models = pytest.importorskip("runtime.models")
    optimizer = pytest.importorskip("runtime.states.optimizer")
    assert set(models._FAMILIES) == ARCHITECTURES
    assert set(optimizer.WEIGHT_DTYPES) == PRECISIONS
    for kind in Optimizer:
        if kind in OPTIMIZERS:
            assert optimizer.precisions(replace(JOB, optimizer=kind))
        else:
            with pytest.raises(ValueError, match=str(kind)):
                optimizer.precisions(replace(JOB, optimizer=kind))


def test_every_preset_is_trained_or_refused_with_a_reason():
    refused = {preset.name for preset in presets() if job_refusals(read_model(preset.name), JOB)}
    assert "gpt-oss-20b" in {name.lower() for name in refused}
    assert "8b" not in refused
