"""Where a run begins and what it leaves: checkpoints and first weights as the flags ask for them.

    --resume auto     the run folder's last checkpoint that is whole, if there is any (as torchrun's
                      restarts need), else --init-from, else values from the seed
    --resume FOLDER   that checkpoint, of whatever run and plan of this model
    --save-every N    after every N steps and after the last; SIGTERM saves in any case

What a resumed run does differently from the one that was saved (data, seed, schedule) is said.
"""

import sys
from dataclasses import fields
from pathlib import Path

from planner.codec import encode
from planner.plan import Plan
from runtime.checkpoints.folders import step_name
from runtime.checkpoints.saving import Checkpoints, RunRecord, Samples
from runtime.checkpoints.sharded_state import buffers_of
from runtime.communication.mesh import Group, Mesh
from runtime.program import Program
from runtime.states.optimizer import OptimizerSettings, ShardedOptimizer
from runtime.states.zero import ShardedStates
from runtime.training.options import AUTO, FRESH, TrainingOptions
from runtime.training.survival import TrainingBrokeError
from runtime.weights.pretrained import load_pretrained

FOLDER = "checkpoints"  # in the run folder


class RunState:
    """A rank's share of what outlives the run."""

    def __init__(
        self,
        plan: Plan,
        options: TrainingOptions,
        *,
        mesh: Mesh,
        group: Group,
        states: ShardedStates,
        optimizer: ShardedOptimizer,
        program: Program,
    ) -> None:
        """Take hold of a run's parts.

        Args:
            plan: The run's.
            options: The run's.
            mesh: Where this rank stands.
            group: All ranks, over the host, used by nothing else.
            states: Weights, whose values may still be replaced.
            optimizer: Its states are saved too.
            program: Its routers' corrections are saved too.

        """
        self._plan = plan
        self._options = options
        self._mesh = mesh
        self._folder = options.output / FOLDER
        self._parts = (states, optimizer, buffers_of(program))
        self._record = record_of_run(plan, options)
        self._checkpoints = Checkpoints(
            self._folder,
            mesh,
            group,
            self._record,
            keep=options.keep,
            in_background=options.save_in_background,
        )
        self._saved = 0

    def begin(self) -> int:
        """Give the run its first state and return the steps that are done.

        Raises:
            ValueError: The checkpoint or the folder of weights cannot be used.

        """
        found = self._resume()
        if found is not None:
            self._saved = found.num_steps
            self._say(f"going on after {found.num_steps} steps")
            for difference in differences(found, self._record):
                self._say(f"warning: {difference}")
            return found.num_steps
        if self._options.init_from is not None:
            states, _, buffers = self._parts
            folder = self._options.init_from
            load_pretrained(folder, self._plan.model, self._mesh, states, buffers)
            self._say(f"weights of {folder}")
        return 0

    def _resume(self) -> RunRecord | None:
        if self._options.resume == FRESH:
            return None
        if self._options.resume == AUTO:
            return self._checkpoints.load_latest(*self._parts)
        return self._checkpoints.load(Path(self._options.resume), *self._parts)

    def save_if_due(self, num_steps: int) -> None:
        """Save where the flags ask for it after so many steps.

        Raises:
            TrainingBrokeError: The checkpoint, or the one before in the background, cannot be
                written.

        """
        every = self._options.save_every
        if every and (num_steps % every == 0 or num_steps == self._options.steps):
            self.save(num_steps)

    def save(self, num_steps: int) -> Path:
        """Save after so many steps, unless that is done, and return where.

        Raises:
            TrainingBrokeError: As above.

        """
        try:
            if num_steps != self._saved:
                self._checkpoints.save(*self._parts, num_steps)
                self._saved = num_steps
        except ValueError as error:
            raise TrainingBrokeError(str(error)) from error
        return self._folder / step_name(num_steps)

    def finish(self) -> None:
        """Complete what is written in the background.

        Raises:
            TrainingBrokeError: It cannot be written.

        """
        try:
            self._checkpoints.wait()
        except ValueError as error:
            raise TrainingBrokeError(str(error)) from error

    def _say(self, text: str) -> None:
        if self._mesh.rank == 0:
            print(text, file=sys.stderr)  # noqa: T201  (progress)


def record_of_run(plan: Plan, options: TrainingOptions) -> RunRecord:
    """Return what a checkpoint says of a run that begins."""
    source = "synthetic" if options.synthetic else " ".join(map(str, options.data))
    return RunRecord(
        num_steps=0,
        model=plan.model,
        optimizer=options.optimizer_settings(OptimizerSettings(kind=plan.job.optimizer)),
        samples=Samples(
            source=source or "the standard library",
            seed=options.seed,
            seq_len=plan.job.seq_len,
            global_batch_size=plan.job.global_batch_size,
        ),
    )


def differences(then: RunRecord, now: RunRecord) -> list[str]:
    """Say in which samples and which schedule a run goes on otherwise than it was saved."""
    pairs = ((then.samples, now.samples), (then.optimizer, now.optimizer))
    return [
        f"{field.name} was {getattr(old, field.name)} when the checkpoint was saved, and is "
        f"{getattr(new, field.name)} now"
        for old, new in pairs
        for field in fields(old)
        if encode(getattr(old, field.name)) != encode(getattr(new, field.name))
    ]
