"""From micro-batches and steps to the constants that programs show (`steps.py`)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from costmodels.hardware import Calibration, HardwareProfile, make_cluster
from costmodels.layout_table import table_of
from costmodels.least_squares import Unknown, fit
from costmodels.time.estimate import estimate_time
from costmodels.time.layouts import layout_costs
from runtime.measure.fitting import Found
from runtime.measure.samples import Sample
from runtime.measure.steps import DECODERS, job_of, layout_of

Vector = NDArray[np.float64]

SUSTAINED = ("gemm_efficiency", "memory_efficiency", "kernel_gap")


def fit_programs(samples: Sequence[Sample], profile: HardwareProfile, ranks: int) -> list[Found]:
    """Find what programs sustain of the rates of single kernels, and what a step costs once.

    Args:
        samples: Those of "micro_batch" and "step"; nothing is found without them.
        profile: All other constants, and these three as single kernels have them.
        ranks: That measured.

    """
    runs = [s for s in samples if s.formula == "micro_batch"]
    if not runs:
        return []
    alone = dict(profile.calibration.constants)

    def predict(values: Vector) -> Vector:
        changed = _with(profile, dict(zip(SUSTAINED, map(float, values), strict=True)))
        return np.array([_micro_batch_seconds(changed, run, ranks) for run in runs])

    # No program is much faster than its kernels in loops; few are half as fast.
    found = fit(
        predict,
        [run.seconds for run in runs],
        [
            *(
                Unknown(name=name, start=alone[name], low=alone[name] / 3, high=alone[name] * 1.1)
                for name in SUSTAINED[:2]
            ),
            Unknown(
                name="kernel_gap",
                start=5 * alone["kernel_gap"],
                low=alone["kernel_gap"],
                high=100 * alone["kernel_gap"],
            ),
        ],
    )
    basis = f"{len(runs)} micro-batches, median error {100 * found.median_error:.0f} %"
    sustained = dict(zip(SUSTAINED, map(float, found.values), strict=True))
    return [
        *(
            Found(key=f"constants.{name}", value=value, basis=basis)
            for name, value in sustained.items()
        ),
        *_step_overhead(samples, _with(profile, {**sustained, "step_overhead": 0.0}), ranks),
    ]


def _step_overhead(samples: Sequence[Sample], profile: HardwareProfile, ranks: int) -> list[Found]:
    steps = [s for s in samples if s.formula == "step"]
    rests = [step.seconds - _step_seconds(profile, step, ranks) for step in steps]
    return [
        Found(
            key="constants.step_overhead",
            value=max(float(np.median(rests)), 0.0),
            basis=f"{len(steps)} steps beyond their micro-batches",
        )
    ]


def _micro_batch_seconds(profile: HardwareProfile, run: Sample, ranks: int) -> float:
    decoder = DECODERS[int(run["decoder"])]
    layout = layout_of(decoder, ranks, int(run["micro_batch_size"]))
    job = job_of(layout, int(run["seq_len"]))
    cluster = make_cluster(profile, ranks)
    costs = layout_costs(decoder.model, job, cluster, table_of([layout]))
    ((_, layer),) = costs.layers
    seconds = costs.embedding.total + decoder.num_layers * layer.total + costs.head.total
    return float(seconds[0])


def _step_seconds(profile: HardwareProfile, run: Sample, ranks: int) -> float:
    decoder = DECODERS[int(run["decoder"])]
    sizes = int(run["micro_batch_size"]), int(run["num_micro_batches"])
    layout = layout_of(decoder, ranks, *sizes)
    job, cluster = job_of(layout, int(run["seq_len"])), make_cluster(profile, ranks)
    return estimate_time(decoder.model, job, cluster, layout).step_seconds


def _with(profile: HardwareProfile, constants: Mapping[str, float]) -> HardwareProfile:
    known = dict(profile.calibration.constants)
    known.update(constants)
    return replace(profile, calibration=Calibration(constants=tuple(known.items())))
