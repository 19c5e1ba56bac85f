"""What an emitter returns: files, environment and command, as text; nothing is written here.

A plan is data from strangers, so every value that reaches a script, a comment or a config goes
through `planner.emit.text`.
"""

from dataclasses import dataclass
from typing import Protocol

from costmodels.hardware import Cluster
from costmodels.job import Target, TrainingJob
from costmodels.layout import Layout
from costmodels.model import ModelSpec

SCHEMA = 1


class IllegalPlanError(ValueError):
    """A plan's layout breaks a rule of the target; the message says which, and what would do."""


class CannotExpress(ValueError):  # noqa: N818  # it reads as a sentence: megatron CannotExpress ...
    """A framework has no way to say what the plan says.

    Attributes:
        target: The framework.
        what: The part of the plan that it cannot say.

    """

    def __init__(self, target: Target, what: str, remedy: str = "") -> None:
        self.target, self.what = target, what
        hint = f"; {remedy}" if remedy else ""
        super().__init__(f"{target.value} cannot express {what}{hint}")


class PlanLike(Protocol):
    """The inputs of a plan; `planner.plan.Plan` is one."""

    @property
    def model(self) -> ModelSpec:
        """The network."""

    @property
    def job(self) -> TrainingJob:
        """The step to train."""

    @property
    def cluster(self) -> Cluster:
        """The machine."""

    @property
    def layout(self) -> Layout:
        """How the step is spread over it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmittedFile:
    """A file to write, its path relative to the output folder."""

    path: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """An environment variable and why it is set."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """Everything that runs a plan on one framework.

    Attributes:
        command: What each node runs, as an argument list; `launch.sh` wraps it.

    """

    target: Target
    files: tuple[EmittedFile, ...]
    environment: tuple[Variable, ...]
    command: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """Return the object that `planner apply --json` prints."""
        return {
            "schema": SCHEMA,
            "target": self.target.value,
            "files": [{"path": file.path, "text": file.text} for file in self.files],
            "environment": {variable.name: variable.value for variable in self.environment},
            "command": list(self.command),
        }
