"""Our side: a layout's program as the runtime runs it, on the weights and tokens of the other."""

from by_hand import BETAS, DECAY, EPSILON, MAX_NORM, RATE
from torch import Tensor
from torch.fx import GraphModule

from costmodels.job import TrainingJob
from costmodels.layout import Layout
from runtime.communication.mesh import World
from runtime.executor import Executor
from runtime.lower import program_of
from runtime.states.first_values import Initialiser
from runtime.states.optimizer import OptimizerSettings, ShardedOptimizer, precisions
from runtime.states.zero import ShardedStates

SETTINGS = OptimizerSettings(
    learning_rate=RATE, betas=BETAS, epsilon=EPSILON, weight_decay=DECAY, max_norm=MAX_NORM
)


class Ours:
    """The runtime's program of one rank, with its states and optimizer."""

    def __init__(
        self,
        lowered: GraphModule,
        job: TrainingJob,
        layout: Layout,
        world: World,
        values: Initialiser,
    ) -> None:
        mesh = world.mesh(layout)
        program = program_of(lowered, layout, mesh)
        states = ShardedStates(program, mesh, precisions(job), initialise=values)
        self._executor = Executor(program, mesh, states)
        self._optimizer = ShardedOptimizer(states, SETTINGS)
        self._size = layout.micro_batch_size

    def step(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Run one step on this data rank's tokens [B, S] and return the loss of all ranks."""
        cuts = zip(ids.split(self._size), labels.split(self._size), strict=True)
        loss = self._executor.run([{"input_ids": x, "labels": y} for x, y in cuts])
        self._optimizer.step(0)
        return loss
