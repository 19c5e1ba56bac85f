"""A constant of 0 is refused or harmless: whatever the model divides by is known as a divisor."""

import math
from dataclasses import replace
from itertools import product

import pytest

from costmodels.hardware import Calibration
from costmodels.job import Precision, Switches, TrainingJob
from costmodels.layout import Layout, Offload
from costmodels.profiles.reader import make_cluster, read_profile
from costmodels.time.estimate import estimate_time
from planner.presets import read_model

BLACKWELL = read_profile("b200-sxm-180gb")
STAGED = read_profile("b200-sxm-180gb", ("links.intra_node.peer_access=false",))  # by the host
CONSTANTS = [name for name, _ in BLACKWELL.calibration.constants]
LAYOUT = Layout(
    data_parallel=4,
    tensor_parallel=2,
    pipeline_parallel=2,
    expert_parallel=2,
    zero_stage=1,
    zero_group=4,
    num_micro_batches=4,
    offload=(Offload.OPTIMIZER,),
    layers_per_stage=(16, 16),
)
# Between them they use every rate: number formats, attention kernels, experts, power, padding.
JOBS = [
    TrainingJob(seq_len=4096, global_batch_size=16, precision=precision, switches=Switches(**facts))
    for precision, facts in (
        (Precision.BF16, {}),
        (Precision.BF16, {"attention_kernel": "torch-softmax"}),
        (Precision.FP32, {}),
        (Precision.FP8, {"attention_kernel": "flash-1"}),
        (Precision.FP8, {"rowwise_fp8": True, "power_limited": True}),
        (Precision.MXFP8, {}),
        (Precision.NVFP4, {}),
    )
]


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_of_zero_is_refused_or_leaves_the_step_finite(name):
    constants = tuple(
        (key, 0.0 if key == name else v) for key, v in BLACKWELL.calibration.constants
    )
    try:
        calibration = Calibration(constants=constants)
    except ValueError as error:
        assert name in str(error)  # noqa: PT017 - refusing is one of two right answers
        return
    machines = (replace(profile, calibration=calibration) for profile in (BLACKWELL, STAGED))
    for profile, job in product(machines, JOBS):
        cluster = make_cluster(profile, 16, 8)
        seconds = estimate_time(read_model("mixtral-8x7b"), job, cluster, LAYOUT).step_seconds
        assert math.isfinite(seconds)
        assert seconds > 0
