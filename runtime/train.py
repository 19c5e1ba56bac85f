"""Trains a plan: what the script that `planner apply` writes stands on.

`run` reads plan and flags, joins the job as one of its ranks, builds a `Trainer` and hands it to
the script's own loop. What ends it otherwise than at its last step is said in one message:

    2      wrong input, said once
    1      the run broke: a rank died or never came (which one), a loss or gradient that is no
           number, a checkpoint that cannot be written; those before it stay
    143    SIGTERM: the step that ran is done and saved

Started again, it goes on from its last checkpoint; torchrun does so by itself (--max-restarts).
"""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch
from torch._C._distributed_c10d import HashStore

from planner.plan import Plan, read_plan
from runtime.any_module.modules import check_reference
from runtime.communication.mesh import World, join
from runtime.states.optimizer import NotFiniteError, precisions
from runtime.training.dropped_shares import check_capacity
from runtime.training.expert_bias import check_bias_updates
from runtime.training.options import TrainingOptions, parse_options
from runtime.training.survival import Heartbeat, StoppedError, TrainingBrokeError, failure_message
from runtime.training.trainer import Trainer, open_source
from runtime.weights.pretrained import check_config

WRONG_INPUT, BROKEN, STOPPED = 2, 1, 128 + signal.SIGTERM


def run(
    plan_path: Path,
    choices: Mapping[str, object],
    train: Callable[[Trainer], None],
    module: str | None = None,
) -> int:
    """Run a training script on this rank and return its exit status.

    Args:
        plan_path: The plan, beside the script.
        choices: The layout as the script shows it; it must agree with the plan.
        train: The script's loop.
        module: `package.module:function` where the plan is of a traced module; the script names
            it, since a plan is data and is never followed to code.

    """
    try:
        options = parse_options(sys.argv[1:], plan_path.parent)
        plan = read_plan(plan_path)
        check_choices(plan, choices)
        check_options(plan, options, module)
        if options.check:
            open_source(plan, options)
            if options.init_from is not None:
                check_config(options.init_from, plan.model)
            return 0
        check_world_size(plan)
        check_launch()
        device = _own_device(plan, options)
    except ValueError as error:
        if _speaks():
            _say(f"error: {error}")
        return WRONG_INPUT
    timeout = timedelta(seconds=options.timeout)
    launched = "WORLD_SIZE" in os.environ
    store = None if launched else HashStore()
    with ExitStack() as stack:
        try:
            joined = join(device=device, timeout=timeout, store=store, rank=0, world_size=1)
            world = stack.enter_context(joined)
        except RuntimeError as error:  # torch's DistError among them
            reason = str(error).partition("\n")[0]
            _say(f"error: rank {os.environ.get('RANK', '0')} did not meet the others: {reason}")
            return BROKEN
        assert world.store is not None
        beat = Heartbeat(world.second_store(), world.rank, world.size, patience=options.timeout)
        with beat.beating():
            status = _run_joined(lambda: Trainer(plan, options, world, module), world, train, beat)
        if status:
            sys.stderr.flush()
            os._exit(status)  # the others may be gone: there is nobody to part from
    return 0


def _run_joined(
    make: Callable[[], Trainer],
    world: World,
    train: Callable[[Trainer], None],
    beat: Heartbeat,
) -> int:
    trainer, fault = None, ""
    try:
        trainer = make()
    except ValueError as error:
        fault = str(error)
    faults = _share_faults(world, fault)
    if faults or trainer is None:
        if world.rank == 0:
            for message in faults:
                _say(f"error: {message}")
        return WRONG_INPUT
    try:
        train(trainer)
    except StoppedError as error:
        if world.rank == 0:
            _say(str(error))
        return STOPPED
    except (TrainingBrokeError, NotFiniteError) as error:  # the same on every rank
        if world.rank == 0:
            _say(f"error: {error}")
        return BROKEN
    except RuntimeError as error:
        _say(failure_message(world.rank, trainer.step, beat.silent_ranks(), error))
        return BROKEN
    return 0


def check_choices(plan: Plan, choices: Mapping[str, object]) -> None:
    """Refuse a script whose visible choices are not the plan's.

    Raises:
        ValueError: Names the first choice that differs, with both values.

    """
    for name, shown in choices.items():
        planned = getattr(plan.layout, name, None)
        if planned != shown:
            raise ValueError(
                f"train.py says {name} = {shown!r}, plan.json says {planned!r}; run planner apply "
                "again to change the plan"
            )


def check_options(plan: Plan, options: TrainingOptions, module: str | None) -> None:
    """Refuse what a plan cannot be trained with, before processes meet.

    Raises:
        ValueError: The runtime does not have the plan's formats, or a flag does not suit its model.

    """
    precisions(plan.job)
    check_reference(plan, module)
    check_bias_updates(plan, options.bias_update_rate)
    check_capacity(plan, options.capacity_factor)


def check_world_size(plan: Plan) -> None:
    """Refuse a number of ranks that is not the plan's.

    Raises:
        ValueError: With both numbers.

    """
    planned = plan.layout.num_gpus
    launched = _number("WORLD_SIZE", "1")
    if launched != planned:
        raise ValueError(
            f"the plan is for {planned} ranks, this job has {launched}; start it with launch.sh, "
            "or search a plan for these GPUs (planner search --gpus)"
        )


def check_launch() -> None:
    """Refuse what a launcher says of this rank, where it cannot be.

    Raises:
        ValueError: Names the variables.

    """
    if "WORLD_SIZE" not in os.environ:
        return  # a process alone
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ValueError(
            f"WORLD_SIZE is set in the environment and {', '.join(missing)} is not; start the job "
            "with launch.sh (torchrun sets all of them)"
        )
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    if rank >= size:
        raise ValueError(f"there is no rank {rank} (RANK) of {size} (WORLD_SIZE), counted from 0")
    for name in ("MASTER_PORT", "LOCAL_WORLD_SIZE"):
        _number(name, "0")


def _speaks() -> bool:
    """Whether this rank tells what all find alike: the first one, or one that the job lacks."""
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not (rank.isdecimal() and size.isdecimal()):
        return True
    return int(rank) == 0 or int(rank) >= int(size)


def _number(name: str, default: str = "") -> int:
    text = os.environ.get(name, default)
    if not text.isdecimal():
        raise ValueError(
            f"{name} is {text!r} in the environment, not a whole number; start the job with "
            "launch.sh"
        )
    return int(text)


def _own_device(plan: Plan, options: TrainingOptions) -> torch.device:
    """Return this rank's device.

    Raises:
        ValueError: A GPU is asked for, and this rank has none.

    """
    planned = "cpu" if plan.cluster.profile.generation == "cpu" else "cuda"
    num_gpus = torch.cuda.device_count() if planned == "cuda" or options.device_type else 0
    wanted = options.device_type or (planned if num_gpus else "cpu")
    if wanted == "cpu":
        return torch.device("cpu")
    local_rank = _number("LOCAL_RANK", "0")
    if local_rank >= num_gpus:
        raise ValueError(f"rank {local_rank} of this node has no GPU: torch sees {num_gpus}")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _share_faults(world: World, fault: str) -> list[str]:
    """Return the distinct faults of all ranks, so that all end alike; rank 0 tells them."""
    assert world.store is not None
    world.store.set(f"setup/{world.rank}", fault)
    if world.rank == 0:
        found = [world.store.get(f"setup/{rank}").decode() for rank in range(world.size)]
        world.store.set("setup/all", "\0".join(dict.fromkeys(filter(None, found))))
    return [text for text in world.store.get("setup/all").decode().split("\0") if text]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201  (messages of a script)
