"""Trainer: one rank of a training run, from a plan and the script's flags."""

import signal
import sys
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from planner.plan import Plan
from runtime.any_module.modules import lowered_plan, module_of_plan
from runtime.communication import collectives
from runtime.communication.grid import coordinates
from runtime.communication.mesh import World
from runtime.context import context_share
from runtime.executor import Executor
from runtime.lower import program_of
from runtime.program import Program
from runtime.states.first_values import Initialiser
from runtime.states.initialise import normal_initialiser
from runtime.states.optimizer import OptimizerSettings, ShardedOptimizer, learning_rate, precisions
from runtime.states.zero import ShardedStates
from runtime.tracing.events import Trace, observed
from runtime.tracing.file import hand_over, handed_over, write_trace
from runtime.tracing.predicted import predicted_actions
from runtime.training.data import Source, SyntheticStream, micro_batches, open_data, share_of
from runtime.training.dropped_shares import DroppedShares
from runtime.training.expert_bias import BiasUpdates
from runtime.training.metrics import (
    WARM_UP_STEPS,
    Measurement,
    Recorder,
    model_flops_utilisation,
    peak_memory,
)
from runtime.training.options import TrainingOptions
from runtime.training.run_state import RunState
from runtime.training.survival import StoppedError, TrainingBrokeError


class Trainer:
    """One rank of a training run.

    Attributes:
        executor: Runs forward and backward of a step.
        optimizer: Clips, updates, publishes.
        step: The step that runs.

    """

    def __init__(
        self, plan: Plan, options: TrainingOptions, world: World, module: str | None = None
    ) -> None:
        """Open the data, lower the model and give it its first values.

        Args:
            plan: What to run.
            options: The script's flags, which suit the plan (`train.check_options`).
            world: All ranks.
            module: `package.module:function` where the plan is of a traced module.

        Raises:
            ValueError: The plan, the module or an option cannot be carried out.

        """
        self.step = 0
        self._plan = plan
        self._options = options
        self._world = world
        self._trace = (
            Trace(world.device, first_step=WARM_UP_STEPS, num_steps=options.trace)
            if options.trace
            else None
        )
        mesh = world.mesh(plan.layout)
        self._mesh = mesh if self._trace is None else observed(mesh, self._trace)
        self._source = open_source(plan, options)
        self._settings = options.optimizer_settings(OptimizerSettings(kind=plan.job.optimizer))
        program, first_values, warnings = self._lowered(module)
        self._states = ShardedStates(
            program, self._mesh, precisions(plan.job), initialise=first_values
        )
        self.executor = Executor(program, self._mesh, self._states, trace=self._trace)
        self.optimizer = ShardedOptimizer(self._states, self._settings, checks_norm=True)
        rate = options.bias_update_rate
        self._biases = BiasUpdates(program, self._mesh, rate) if rate else None
        self._dropped = DroppedShares(program, self._mesh) if options.capacity_factor else None
        self._run_state = RunState(
            plan,
            options,
            mesh=self._mesh,
            group=world.host_group(),
            states=self._states,
            optimizer=self.optimizer,
            program=program,
        )
        self.step = self._run_state.begin()
        if self._trace is not None:
            self._trace.move(self.step)
        self._recorder = (
            Recorder(options.output, plan, resumed=self.step > 0) if world.rank == 0 else None
        )
        self._asked_to_stop = False  # this rank alone; set by a signal at any moment
        self._stop = False  # all ranks; set where they agree, and nowhere else
        self._start = time.perf_counter()
        if world.rank == 0:
            for warning in warnings:
                print(f"warning: {warning}", file=sys.stderr)  # noqa: T201  (progress)

    def _lowered(self, module: str | None) -> tuple[Program, Initialiser, tuple[str, ...]]:
        """Return this rank's program, what gives its weights their first values, and warnings."""
        plan, options, device = self._plan, self._options, self._world.device
        built = module_of_plan(plan, module, seed=options.seed, device=device)
        lowered = lowered_plan(plan, built, capacity_factor=options.capacity_factor)
        program = program_of(lowered, plan.layout, self._mesh)
        if built is not None:
            return program, built.values, (*built.warnings, *program.warnings)
        values = normal_initialiser(options.seed, plan.model.num_layers, device)
        return program, values, program.warnings

    def steps(self) -> Iterator[int]:
        """Yield the steps that are left.

        Raises:
            StoppedError: SIGTERM came; the step that ran is done and saved.
            TrainingBrokeError: A checkpoint cannot be written.

        """
        signal.signal(signal.SIGTERM, self._ask_to_stop)
        for step in range(self.step, self._options.steps):
            self.step = step
            self._start = time.perf_counter()
            if self._trace is not None:
                self._trace.begin_step(step)
            yield step
            if self._stop:
                saved = self._run_state.save(step + 1)
                self._run_state.finish()
                raise StoppedError(f"stopped by SIGTERM after step {step}, saved in {saved}")
        self._finish()

    def micro_batches(self, step: int) -> list[dict[str, Tensor]]:
        """Return this rank's share of a step's sequences, and of their tokens."""
        layout, job = self._plan.layout, self._plan.job
        rank = self._mesh.coordinate("dp")
        whole = micro_batches(
            self._source,
            seed=self._options.seed,
            step=step,
            sequences=share_of(job.global_batch_size, layout.data_parallel, rank),
            micro_batch_size=layout.micro_batch_size,
            seq_len=job.seq_len,
            device=self._mesh.device,
        )
        return [context_share(batch, layout, self._mesh.coordinate("cp")) for batch in whole]

    def check(self, step: int, loss: Tensor) -> None:
        """End the run where a step's loss is no number, before the step changes the weights.

        Raises:
            TrainingBrokeError: The same on every rank: the loss is the global one.

        """
        if not torch.isfinite(loss):  # waits for the device
            raise TrainingBrokeError(
                f"the loss is {loss.item()} in step {step}, which is not applied; try a lower "
                "--learning-rate or a longer --warmup-steps"
            )

    def record(self, step: int, loss: Tensor, gradient_norm: Tensor) -> None:
        """Measure the step (a line of measured.jsonl, and one to read), and save where it is due.

        Raises:
            TrainingBrokeError: A checkpoint cannot be written.

        """
        loss_now = loss.item()  # waits for the device
        seconds = time.perf_counter() - self._start
        if self._trace is not None:
            self._trace.end_step()
        imbalance = 0.0 if self._biases is None else self._biases.step()
        dropped = None if self._dropped is None else self._dropped.step()
        allocated, reserved, imbalance = self._agree(*peak_memory(self._mesh.device), imbalance)
        self._run_state.save_if_due(step + 1)
        if self._recorder is None:
            return
        on_gpu = self._mesh.device.type == "cuda"
        tokens = self._plan.job.tokens_per_step / self._plan.layout.num_gpus
        self._recorder.record(
            Measurement(
                step=step,
                loss=loss_now,
                gradient_norm=gradient_norm.item(),
                learning_rate=learning_rate(self._settings, step),
                step_seconds=seconds,
                tokens_per_second_per_gpu=tokens / seconds,
                mfu=model_flops_utilisation(self._plan, seconds),
                allocated_gib=allocated if on_gpu else None,
                reserved_gib=reserved,
                expert_imbalance=None if self._biases is None else imbalance,
                dropped_share=dropped,
            )
        )

    def _agree(self, *mine: float) -> list[float]:
        """Return the largest figures of all ranks; on the way, all learn whether one must stop."""
        asked = torch.tensor([*mine, float(self._asked_to_stop)], dtype=torch.float32)
        largest = collectives.all_reduce(
            asked.to(self._mesh.device), self._mesh.group("world"), "max"
        )
        *figures, stop = largest.tolist()
        self._stop = bool(stop)
        return figures

    def _ask_to_stop(self, signum: int, frame: object) -> None:  # noqa: ARG002  (a handler)
        self._asked_to_stop = True

    def _finish(self) -> None:
        self._states.wait_weights()  # no rank leaves while another still receives
        self._run_state.finish()
        if self._trace is not None:
            self._write_trace(self._trace)
        if self._recorder is not None:
            print(self._recorder.finish())  # noqa: T201  (the run's result)

    def _write_trace(self, trace: Trace) -> None:
        """Let rank 0 write what every rank did.

        Raises:
            TrainingBrokeError: It cannot.

        """
        store, size = self._world.store, self._world.size
        assert store is not None
        hand_over(store, self._world.rank, trace.events())
        if self._world.rank:
            return
        predicted = predicted_actions(self._plan)
        layout = self._plan.layout
        ranks = (
            (rank, events, predicted[coordinates(layout, rank)["pp"]])
            for rank, events in handed_over(store, size)
        )
        try:
            path = write_trace(self._options.output, ranks)
        except ValueError as error:
            raise TrainingBrokeError(str(error)) from error
        print(f"wrote {path} (open it in ui.perfetto.dev)", file=sys.stderr)  # noqa: T201  (progress)


def open_source(plan: Plan, options: TrainingOptions) -> Source:
    """Return where a run's sequences come from.

    Raises:
        ValueError: The data cannot be read, or does not fit the model.

    """
    if options.synthetic:
        return SyntheticStream(vocab_size=plan.model.vocab_size)
    return open_data(
        options.data,
        vocab_size=plan.model.vocab_size,
        seq_len=plan.job.seq_len,
        tokenizer=options.tokenizer,
    )
