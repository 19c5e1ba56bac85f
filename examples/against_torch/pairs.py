"""Two programs in the same processes, a turn of one and a turn of the other, again and again.

What else the machine does falls on both alike, so the ratio of a pair says more than two rates
taken one after the other. Who goes first changes from pair to pair. A turn lasts as long as on its
slowest rank: all meet before and after it.
"""

import gc
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from cases import Case, Size, Trains
from live_storage import peak_of
from ours import Ours
from torch import Tensor

from costmodels.job import Precision, TrainingJob
from runtime.communication.mesh import World
from runtime.launch import run_ranks
from runtime.lower import lower_graph
from runtime.models import build_model
from runtime.models.llama import Llama
from runtime.program import ParameterShard
from runtime.states.initialise import NormalValues, normal_initialiser

TIMEOUT = 1800.0  # s, for one case
WARM_UP = 2  # steps that connect, allocate and create the optimizer's states

Make = Callable[[], Trains]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What a case measured.

    Attributes:
        seconds: (ours, theirs) of every turn, slowest rank.
        peak: (ours, theirs) in bytes of the fullest rank.
        loss_difference: Largest relative difference of two losses of the same step.

    """

    seconds: list[tuple[float, float]]
    peak: tuple[int, int]
    loss_difference: float


def compare(case: Case, size: Size, *, pairs: int, steps: int) -> Compared:
    """Run one case.

    Args:
        case: A layout and its other side.
        size: What is trained.
        pairs: Turns of each side that count.
        steps: Steps of a turn.

    Raises:
        RankFailedError: A rank failed; the message names it.

    """
    torch.set_num_threads(1)  # before the fork: OpenMP's threads do not survive it
    job = TrainingJob(seq_len=size.seq_len, global_batch_size=size.batch, precision=Precision.FP32)
    lowered = lower_graph(size.model, job, case.layout)
    values = normal_initialiser(0, size.model.num_layers, torch.device("cpu"))

    def work(world: World) -> dict[str, object]:
        def ours() -> Trains:
            graph = deepcopy(lowered)  # a program takes the graph's modules over
            return Ours(graph, job, case.layout, world, values)

        def theirs() -> Trains:
            return case.by_hand(_model(size, values))

        return _compare(ours, theirs, _Data(case, size, world.rank), pairs, steps)

    return Compared(**run_ranks(work, case.layout.num_gpus, timeout=TIMEOUT)[0])


def _compare(ours: Make, theirs: Make, data: "_Data", pairs: int, steps: int) -> dict[str, object]:
    sides = [ours(), theirs()]
    losses: list[list[float]] = [[], []]

    def turn(side: int, steps: int) -> float:
        batches = [data.batch(len(losses[side]) + i) for i in range(steps)]
        dist.barrier()
        start = time.perf_counter()
        reached = [sides[side].step(*batch) for batch in batches]
        seconds = _largest(time.perf_counter() - start)
        losses[side] += [loss.item() for loss in reached]
        return seconds

    for side in (0, 1):
        turn(side, WARM_UP)
    gc.collect()
    gc.freeze()  # a collection would fall on whichever side runs
    seconds = []
    for pair in range(pairs):
        order = (0, 1) if pair % 2 == 0 else (1, 0)
        took = {side: turn(side, steps) for side in order}
        seconds.append((took[0], took[1]))
    sides.clear()
    gc.unfreeze()
    gc.collect()
    return {
        "seconds": seconds,
        "peak": tuple(_peak_bytes(make, data) for make in (ours, theirs)),
        "loss_difference": max(abs(a / b - 1) for a, b in zip(*losses, strict=True)),
    }


def _peak_bytes(make: Make, data: "_Data") -> int:
    """Return the most storage that lives at any moment of a step, on the fullest rank."""

    def prepare() -> Callable[[], object]:
        program = make()
        for step in range(WARM_UP):
            program.step(*data.batch(step))
        gc.collect()
        return lambda: program.step(*data.batch(WARM_UP))

    return int(_largest(peak_of(prepare)))


class _Data:
    """Random tokens; labels are the next ones. A data rank sees its share of each step's."""

    def __init__(self, case: Case, size: Size, rank: int) -> None:
        layout = case.layout
        self._shape = (size.batch, size.seq_len)
        self._vocab = size.model.vocab_size
        self._share = size.batch // layout.data_parallel
        # Ranks are laid out with the tensor axis innermost, then data, then the pipeline.
        self._place = rank // layout.tensor_parallel % layout.data_parallel

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return tokens and labels [B / dp, S] of a step."""
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, self._vocab, self._shape, generator=generator)
        both = tokens, tokens.roll(-1, 1)
        mine, labels = (x.split(self._share)[self._place] for x in both)
        return mine, labels


def _model(size: Size, values: NormalValues) -> Llama:
    model = build_model(size.model, seq_len=size.seq_len, device="cpu")
    assert isinstance(model, Llama)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values(ParameterShard(name=name, global_shape=tuple(parameter.shape))))
    return model


def _largest(mine: float) -> float:
    """Return the largest of all ranks' values, after all of them came here."""
    value = torch.tensor([mine], dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()
