"""Samples of training itself: small decoders, forward and backward, and whole steps of one.

A kernel that is called in a loop of its own finds code and arguments in the cache. In a step other
work comes between: the graph's interpreter, autograd, the allocator, kernels that want the cache
for themselves; on a CPU all of that adds up. So the constants that say how much of the rates of
single kernels a program sustains are found from programs:

    micro-batches of several widths    gemm_efficiency, memory_efficiency, kernel_gap
    steps of the narrowest             step_overhead: what they take beyond their micro-batches

Kernels and bytes are those that the cost model counts, so that the constants belong to its counts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import GraphModule

from costmodels.job import Precision, TrainingJob
from costmodels.layout import Layout
from costmodels.model import ModelSpec
from planner.presets import read_model
from runtime.communication.mesh import World
from runtime.executor import Executor
from runtime.lower import lower_graph, program_of
from runtime.measure.samples import Sample, sample
from runtime.measure.stopwatch import Stopwatch
from runtime.program import Batch  # noqa: TC001  (imports look alike everywhere)
from runtime.states.initialise import normal_initialiser
from runtime.states.optimizer import OptimizerSettings, ShardedOptimizer, precisions
from runtime.states.zero import ShardedStates

# Micro-batches of each of the numbers, in one step.
STEPS = (1, 2, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A decoder that is measured, and the micro-batches that it gets.

    Attributes:
        shapes: (sequences, tokens of each).

    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_hidden_size: int
    shapes: tuple[tuple[int, int], ...]

    @property
    def model(self) -> ModelSpec:
        """The network: a small preset of other sizes."""
        return replace(
            read_model("tiny"),
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.hidden_size // self.num_heads,
            ffn_hidden_size=self.ffn_hidden_size,
        )


# Chosen: in the first all is host time, in the last most is arithmetic.
DECODERS = (
    Decoder(
        hidden_size=96,
        num_layers=8,
        num_heads=8,
        num_kv_heads=4,
        ffn_hidden_size=256,
        shapes=((1, 16), (1, 64)),
    ),
    Decoder(
        hidden_size=256,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        ffn_hidden_size=704,
        shapes=((1, 128), (4, 128)),
    ),
    Decoder(
        hidden_size=512,
        num_layers=2,
        num_heads=8,
        num_kv_heads=4,
        ffn_hidden_size=1408,
        shapes=((1, 64), (4, 128)),
    ),
)


def traced_decoders(ranks: int) -> tuple[GraphModule, ...]:
    """Return the decoders' graphs for a number of data-parallel ranks, to be forked with."""
    graphs = []
    for decoder in DECODERS:
        layout = layout_of(decoder, ranks)
        graphs.append(lower_graph(decoder.model, job_of(layout, decoder.shapes[0][1]), layout))
    return tuple(graphs)


def program_samples(
    watch: Stopwatch, world: World, graphs: Sequence[GraphModule]
) -> Iterator[Sample]:
    """Measure micro-batches of every decoder, and steps of the first, on all ranks at once.

    Args:
        watch: Times them; nothing is measured on GPUs, where kernels run behind the host.
        world: All ranks; each has a copy of the model.
        graphs: From `traced_decoders`.

    """
    if watch.device.type != "cpu":
        return
    for number, (decoder, graph) in enumerate(zip(DECODERS, graphs, strict=True)):
        for size, length in decoder.shapes:
            trainer = _Trainer(world, decoder, graph, (size, length, 1))
            yield sample(
                "micro_batch",
                "fp32",
                watch.seconds(trainer.micro_batch),
                decoder=number,
                micro_batch_size=size,
                seq_len=length,
            )
    size, length = DECODERS[0].shapes[0]
    for num_micro_batches in STEPS:
        trainer = _Trainer(world, DECODERS[0], graphs[0], (size, length, num_micro_batches))
        yield sample(
            "step",
            "fp32",
            watch.seconds(trainer.step),
            decoder=0,
            micro_batch_size=size,
            seq_len=length,
            num_micro_batches=num_micro_batches,
        )


class _Trainer:
    """Trains one decoder on one rank; the tokens do not matter."""

    def __init__(
        self, world: World, decoder: Decoder, graph: GraphModule, shape: tuple[int, int, int]
    ) -> None:
        size, length, num_micro_batches = shape
        layout = layout_of(decoder, world.size, size, num_micro_batches)
        mesh, job = world.mesh(layout), job_of(layout, length)
        program = program_of(graph, layout, mesh)
        initialise = normal_initialiser(0, decoder.num_layers, world.device)
        (stage,) = program.stages
        self._stage: Callable[[Tensor | None, Batch], Tensor] = stage
        self._states = ShardedStates(program, mesh, precisions(job), initialise=initialise)
        self._executor = Executor(program, mesh, self._states)
        self._optimizer = ShardedOptimizer(self._states, OptimizerSettings())
        tokens = torch.arange(length).expand(size, -1).contiguous()
        self._batches: list[Batch] = [{"input_ids": tokens, "labels": tokens}] * num_micro_batches

    def micro_batch(self) -> None:
        """Run forward and backward of one micro-batch, without a collective."""
        loss = self._stage(None, self._batches[0])
        self._states.begin_backward(0)
        torch.autograd.backward(loss)
        self._states.end_backward(0)

    def step(self) -> None:
        """Run a whole step."""
        self._executor.run(self._batches)
        self._optimizer.step(0)


def layout_of(
    decoder: Decoder, ranks: int, micro_batch_size: int = 1, num_micro_batches: int = 1
) -> Layout:
    """Return the layout of data-parallel ranks."""
    return Layout(
        data_parallel=ranks,
        micro_batch_size=micro_batch_size,
        num_micro_batches=num_micro_batches,
        layers_per_stage=(decoder.num_layers,),
    )


def job_of(layout: Layout, seq_len: int) -> TrainingJob:
    """Return what the decoders are trained on."""
    sequences = layout.data_parallel * layout.num_micro_batches * layout.micro_batch_size
    return TrainingJob(seq_len=seq_len, global_batch_size=sequences, precision=Precision.FP32)
