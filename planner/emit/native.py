"""native: a plan as a folder that trains by itself with the package installed.

    train.py    the training loop and the plan's choices, to read and to edit
    plan.json   the whole plan, which train.py runs
    launch.sh   torchrun for the plan's ranks;  job.sbatch  the same under Slurm

Nothing of a plan reaches a script unescaped: names are reduced to letters, digits, dots and dashes,
and what the script shows are numbers and words of fixed sets.
"""

from costmodels.hardware import Cluster
from costmodels.job import Target
from costmodels.layout import Layout
from planner.emit.emission import Emission, EmittedFile, IllegalPlanError, Variable
from planner.emit.launch import launch_files, processes_per_node, torchrun
from planner.emit.text import identifier
from planner.meanings import MEANINGS
from planner.plan import Plan, plan_text
from planner.rules import apply_violations, violations
from planner.rules.native_jobs import job_refusals

SCRIPT, PLAN_FILE = "train.py", "plan.json"

# What the script shows of a layout; plan.json holds the rest.
CHOICES = (
    "data_parallel",
    "tensor_parallel",
    "pipeline_parallel",
    "context_parallel",
    "expert_parallel",
    "zero_stage",
    "zero_group",
    "keep_gathered",
    "micro_batch_size",
    "num_micro_batches",
    "stages_per_rank",
    "schedule",
    "layers_per_stage",
    "recompute",
    "recompute_layers",
    "sequence_parallel",
)

TRAIN = '''"""Trains {model} on {num_ranks} rank(s). Made by planner apply; yours to edit."""

import sys
from pathlib import Path

from runtime.train import Trainer, run

# What the plan chose; plan.json holds all of it, and the two must agree.
CHOICES = {{
{choices}
}}
{module}

def train(trainer: Trainer) -> None:
    """Run the steps that are left."""
    for step in trainer.steps():
        micro_batches = trainer.micro_batches(step)  # this rank's share of the global batch
        loss = trainer.executor.run(micro_batches)  # forwards and backwards, as scheduled
        trainer.check(step, loss)  # a loss that is no number ends the run, weights untouched
        gradient_norm = trainer.optimizer.step(step)  # clip, update, share the new weights
        trainer.record(step, loss, gradient_norm)  # measured.jsonl, progress, checkpoints


if __name__ == "__main__":
    sys.exit(run(Path(__file__).with_name("{plan_file}"), CHOICES, train{argument}))
'''


# A reference is letters, digits, underscores, dots and one colon: the command line sees to that.
MODULE = """
# Builds the network; its package must be importable (PYTHONPATH).
MODULE = "{reference}"
"""


def emit_native(plan: Plan, module: str | None = None) -> Emission:
    """Return the run folder of a plan for this project's own runtime.

    Args:
        plan: What to run.
        module: `package.module:function` where the plan is of a traced module.

    Raises:
        ValueError: The layout is illegal, or the runtime does not run it; the message says which
            rule and what would be legal.

    """
    refuse_unsupported(plan, module)
    environment = environment_of(plan)
    program = _torchrun(plan.cluster)
    title = f"{identifier(plan.model.name)} with the native runtime"
    scripts = launch_files(title, plan.cluster, program, (), environment, script=SCRIPT)
    files = (
        EmittedFile(path=SCRIPT, text=train_script(plan, module)),
        EmittedFile(path=PLAN_FILE, text=plan_text(plan)),
        *scripts,
    )
    return Emission(
        target=Target.NATIVE, files=files, environment=environment, command=(*program, SCRIPT)
    )


def refuse_unsupported(plan: Plan, module: str | None = None) -> None:
    """Refuse a plan whose layout is illegal or that the runtime of this version does not run.

    Raises:
        ValueError: With the rules' messages.

    """
    inputs = (plan.model, plan.job, plan.cluster, plan.layout)
    broken = (*violations(*inputs), *apply_violations(*inputs))
    if broken:
        reasons = "; ".join(violation.message for violation in broken)
        raise IllegalPlanError(f"the plan is illegal for native: {reasons}")
    lacking = job_refusals(plan.model, plan.job, has_module=module is not None)
    if lacking:
        raise ValueError(f"the native runtime does not run this job: {'; '.join(lacking)}")


def train_script(plan: Plan, module: str | None = None) -> str:
    """Return train.py: the plan's choices, the module's function where one was named, the loop."""
    named = "" if module is None else MODULE.format(reference=module)
    lines = [
        f"    # {MEANINGS[name]}\n    {_quoted(name)}: {_literal(plan.layout, name)},"
        for name in CHOICES
    ]
    return TRAIN.format(
        model=identifier(plan.model.name),
        num_ranks=plan.layout.num_gpus,
        choices="\n".join(lines),
        plan_file=PLAN_FILE,
        module=named,
        argument="" if module is None else ", MODULE",
    )


def environment_of(plan: Plan) -> tuple[Variable, ...]:
    """Return the variables that the runtime wants, each with its reason."""
    variables = [
        Variable(
            name="OMP_NUM_THREADS",
            value="1",
            reason="Ranks share the host's cores; more threads in each fight for them.",
        )
    ]
    if plan.cluster.profile.generation != "cpu":
        variables.append(
            Variable(
                name="NCCL_DEBUG",
                value="WARN",
                reason="NCCL says which rank and which link failed, and nothing else.",
            )
        )
    if plan.job.switches.expandable_segments:
        variables.append(
            Variable(
                name="PYTORCH_CUDA_ALLOC_CONF",
                value="expandable_segments:True",
                reason="The plan's memory counts on an allocator that does not fragment.",
            )
        )
    return tuple(variables)


def _torchrun(cluster: Cluster) -> tuple[str, ...]:
    if cluster.num_nodes > 1:
        return torchrun(cluster)
    # On one node torchrun finds a free port by itself, so that jobs do not meet on a fixed one.
    return ("torchrun", "--standalone", f"--nproc-per-node={processes_per_node(cluster)}")


def _literal(layout: Layout, name: str) -> str:
    value = getattr(layout, name)
    return _quoted(str(value)) if isinstance(value, str) else repr(value)


def _quoted(word: str) -> str:
    return f'"{word}"'
