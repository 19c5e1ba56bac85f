"""First values of a module that a person's function builds: what its constructor does to weights.

Any rank draws any piece. A copy is filled as its original is, with numbers of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from runtime.any_module.recorder import Recorder, Step
from runtime.communication.mesh import Mesh
from runtime.program import ParameterShard
from runtime.states.initialise import drawn, whole_places


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedValues:
    """First values of a module's parameters: what its constructor does to them, or has made.

    Attributes:
        steps: By parameter, what was done to fresh memory.
        made: Values that the constructor computed, of parameters that did not begin empty.

    """

    seed: int
    device: torch.device
    steps: Mapping[str, tuple[Step, ...]]
    made: Mapping[str, Tensor]

    def __call__(self, shard: ParameterShard) -> Tensor:
        """Return a whole parameter."""
        made = self.made.get(shard.name)
        return made if made is not None else self._draw(shard, whole_places(shard))

    def piece(self, shard: ParameterShard, mesh: Mesh) -> Tensor:
        """Return a rank's piece of a parameter."""
        made = self.made.get(shard.name)
        if made is not None:
            return shard.of_rank(made, mesh).clone()
        return self._draw(shard, shard.places(mesh))

    def _draw(self, shard: ParameterShard, places: tuple[Tensor, ...]) -> Tensor:
        def fill(rows: Tensor, generator: Generator) -> None:
            rows.zero_()
            for step in self.steps.get(shard.name, ()):
                step.run(rows, generator)

        return drawn(shard, places, fill, seed=self.seed, device=self.device)


def recorded_values(
    module: nn.Module, recorder: Recorder, *, seed: int, device: torch.device
) -> tuple[RecordedValues, tuple[str, ...]]:
    """Return the first values of a module's parameters, and in words what of them is left out."""
    steps, made, lost = {}, {}, []
    for name, parameter in module.named_parameters():
        if not parameter.is_meta:
            made[name] = parameter.detach().clone()
            continue
        steps[name], unknown = recorder.memory(parameter)
        begins = "" if steps[name] else ", so it begins as zeros"
        if unknown:
            lost.append(f"{name}: {unknown} of its first values is left out{begins}")
        elif begins:
            lost.append(f"{name}: nothing fills it{begins}")
    return RecordedValues(seed=seed, device=device, steps=steps, made=made), tuple(lost)
