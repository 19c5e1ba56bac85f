"""From costs to integers: the split of one layout's layers as the solver sees it.

With one stage per rank, w_r the seconds that rank r spends on a micro-batch (F forward), T their
sum over ranks, m micro-batches, p ranks, k_r = min(m, p - r) forwards before the first backward
and c all transfers between ranks one way, no split runs faster than the largest over r of

    gpipe         T + (m - 1) w_r + 2 c
    1f1b          T + (m - 1) w_r - (k_r - 1) F_r + 2 c
    zero-bubble   F_0 + ... + F_(p-1) + m w_r - k_r F_r, and on the way to the last input gradient
                  T - W + (m - 1) w_r - (k_r - 1) F_r - d_r W_r + 2 (p - 1) c

with d_r = min(m - 1, r) weight gradients that rank r puts off behind that (rank 0: -1, its last one
ends the step) and W the sum of all. Each rank has the one that is larger for an even split. All are
linear in the layers of a stage (derivations: `costmodels/schedule/bound.py`), which makes
them the solver's scores: nanoseconds, rounded down, so that a score is never above the exact
value. Memory is what `costmodels/stage_memory.py` says of the moment of most micro-batches, in
KiB, rounded in favour of fitting; the exact models judge every split that comes back.
"""

from dataclasses import dataclass
from math import ceil, floor, isinf

from costmodels.block_memory import BlockMemory
from costmodels.bounds import around_rows
from costmodels.estimate import stage_costs
from costmodels.hardware import Cluster
from costmodels.job import TrainingJob
from costmodels.layout import Layout, Recompute, Schedule, split_layers
from costmodels.layout_costs import LayoutCosts
from costmodels.layout_table import table_of
from costmodels.memory import stage_memory
from costmodels.model import ModelSpec
from costmodels.stage_costs import BlockSeconds, StageCosts
from costmodels.stage_memory import StageMemory
from costmodels.units import KIB

NANOSECONDS = 1e9
Split = tuple[int, ...]
SPLIT_SCHEDULES = (Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProblem:
    """One layout's layers to be cut into stages; every number is an integer.

    Attributes:
        kind_of_layer: Kind of each layer, in model order.
        cost: Per stage, score of one layer of each kind.
        base: Per stage, score of what is no layer (embedding, head, the pipeline's constant).
        redo_cost: Per stage, score of recomputing one layer.
        holds: Per stage, memory of one layer of each kind.
        held: Per stage, memory of what is no layer.
        saved: Per stage, memory that recomputing one layer saves.
        capacity: Memory of a stage.
        least_recomputed: Smallest k; with `most_recomputed` 0 nothing is recomputed.
        most_recomputed: Largest k.
        cutoff: Scores above this are of no interest.
        hint: Layers per stage to start from.
        excluded: Splits that are known already.

    """

    kind_of_layer: tuple[int, ...]
    cost: tuple[tuple[int, ...], ...]
    base: tuple[int, ...]
    redo_cost: tuple[int, ...]
    holds: tuple[tuple[int, ...], ...]
    held: tuple[int, ...]
    saved: tuple[int, ...]
    capacity: int
    least_recomputed: int = 0
    most_recomputed: int = 0
    cutoff: int | None = None
    hint: tuple[int, ...] = ()
    excluded: tuple[tuple[int, ...], ...] = ()

    @property
    def num_stages(self) -> int:
        """Stages to fill."""
        return len(self.base)

    @property
    def num_layers(self) -> int:
        """Layers to place."""
        return len(self.kind_of_layer)

    def score_of(self, split: tuple[int, ...], recomputed: int) -> int:
        """Return the score of one split with so many recomputed layers per stage."""
        scores, first = [], 0
        for stage, count in enumerate(split):
            kinds = self.kind_of_layer[first : first + count]
            first += count
            redone = self.redo_cost[stage] * min(recomputed, count)
            layers = sum(self.cost[stage][kind] for kind in kinds)
            scores.append(self.base[stage] + layers + redone)
        return max(scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSolution:
    """What the solver found.

    Attributes:
        layers_per_stage: The split; empty when there is none.
        recomputed: Layers that each stage recomputes (k).
        score: Its score.
        bound: No split of the problem scores less; above the cutoff when infeasible.
        is_optimal: Whether the solver proved `score` or that nothing beats the cutoff.

    """

    layers_per_stage: Split
    recomputed: int
    score: int
    bound: int
    is_optimal: bool


def largest_score(problem: StageProblem) -> int:
    """More than any split can score."""
    per_stage = (
        base + problem.num_layers * (max(cost) + redo)
        for base, cost, redo in zip(problem.base, problem.cost, problem.redo_cost, strict=True)
    )
    return max(1, *per_stage, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredProblem:
    """A problem and what its scores mean in seconds.

    Attributes:
        once: Seconds per step besides the pipeline, at their least.
        stretch: Factor on everything.

    """

    problem: StageProblem
    once: float
    stretch: float

    def seconds(self, score: int) -> float:
        """Return the step that no split of this score goes below."""
        return (score / NANOSECONDS + self.once) * self.stretch

    def score(self, seconds: float) -> int | None:
        """Return the largest score whose step may be at most this, None where any may be."""
        if isinf(seconds):
            return None
        return max(0, floor((seconds / self.stretch - self.once) * NANOSECONDS))


def scored_problem(
    model: ModelSpec,
    job: TrainingJob,
    cluster: Cluster,
    layout: Layout,
    limit: float,
    *,
    costs: LayoutCosts,
    blocks: BlockMemory,
) -> ScoredProblem:
    """Return the problem of splitting a layout's layers.

    Args:
        model: The network.
        job: What is trained per step.
        cluster: The machine.
        layout: One stage per rank, in a pipeline of at least 2; its split is not read.
        limit: Bytes that a rank may reserve.
        costs: Seconds of the layout's blocks.
        blocks: Their bytes.

    """
    seconds = stage_costs(model, job, cluster, layout, costs)
    memory = stage_memory(model, job, cluster, layout, blocks)
    once, stretch = around_rows(model, job, cluster, table_of([layout]), costs)
    kinds = [kind for kind, _ in seconds.layers]
    ranks = range(layout.pipeline_parallel)
    is_full = layout.recompute is Recompute.FULL
    scores = _Scores(seconds=seconds, layout=layout, model=model)
    room = _Room(memory=memory, layout=layout)
    problem = StageProblem(
        kind_of_layer=tuple(kinds.index(kind) for kind in model.layer_kinds),
        cost=tuple(tuple(scores.layer(r, block) for _, block in seconds.layers) for r in ranks),
        base=tuple(scores.base(r) for r in ranks),
        redo_cost=(scores.redo,) * layout.pipeline_parallel,
        holds=tuple(tuple(room.layer(r, kind) for kind in range(len(kinds))) for r in ranks),
        held=tuple(room.base(r) for r in ranks),
        saved=tuple(room.saved(r) if is_full else 0 for r in ranks),
        capacity=ceil(limit / KIB),
        least_recomputed=int(is_full),
        most_recomputed=model.num_layers - layout.pipeline_parallel + 1 if is_full else 0,
        hint=split_layers(model.num_layers, layout.pipeline_parallel),
    )
    return ScoredProblem(problem=problem, once=float(once[0]), stretch=stretch)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scores:
    """Nanoseconds of stages, rounded down."""

    seconds: StageCosts
    layout: Layout
    model: ModelSpec

    def layer(self, rank: int, block: BlockSeconds) -> int:
        """Score of one layer on a rank."""
        return floor(self._share(rank, block) * NANOSECONDS)

    def base(self, rank: int) -> int:
        """Score of a rank without layers: its ends, and what every rank waits for."""
        return floor(self._fixed(rank, by_input=self._ends_with_input(rank)) * NANOSECONDS)

    @property
    def redo(self) -> int:
        """Score of recomputing one layer of a rank in every micro-batch."""
        return floor(self.layout.num_micro_batches * self._least_redo() * NANOSECONDS)

    def _ends_with_input(self, rank: int) -> bool:
        """Whether the way over the last input gradient is the longer one for the even split."""
        if self.layout.schedule is not Schedule.ZERO_BUBBLE:
            return False
        layers = [self.seconds.layer(kind) for kind in self.model.layer_kinds]

        def seconds(*, by_input: bool) -> float:
            shares = sum(self._share_of(rank, layer, by_input=by_input) for layer in layers)
            return self._fixed(rank, by_input=by_input) + shares / self.layout.pipeline_parallel

        return seconds(by_input=True) > seconds(by_input=False)

    def _fixed(self, rank: int, *, by_input: bool) -> float:
        last = self.layout.pipeline_parallel - 1
        own = 0.0
        if rank == 0:
            own += self._share_of(rank, self.seconds.embedding, by_input=by_input)
        if rank == last:
            own += self._share_of(rank, self.seconds.head, by_input=by_input)
        return own + self._way_through(by_input=by_input)

    def _share(self, rank: int, block: BlockSeconds) -> float:
        return self._share_of(rank, block, by_input=self._ends_with_input(rank))

    def _share_of(self, rank: int, block: BlockSeconds, *, by_input: bool) -> float:
        """Seconds that a block on a rank adds to that rank's bound."""
        m, schedule = self.layout.num_micro_batches, self.layout.schedule
        ahead = min(m, self.layout.pipeline_parallel - rank)
        work = block.forward + block.backward
        if schedule is Schedule.GPIPE:
            return (m - 1) * work
        if schedule is Schedule.ONE_F_ONE_B:
            return (m - 1) * work - (ahead - 1) * block.forward
        if by_input:
            # Rank 0 puts off none, and its last weight gradient ends the step.
            later = min(m - 1, rank) if rank else -1
            return (m - 1) * work - (ahead - 1) * block.forward - later * block.backward_weight
        return m * work - ahead * block.forward

    def _way_through(self, *, by_input: bool) -> float:
        """Seconds of a micro-batch through all ranks that come on top of every rank's work."""
        blocks = [self.seconds.layer(kind) for kind in self.model.layer_kinds]
        blocks += [self.seconds.embedding, self.seconds.head]
        if self.layout.schedule is Schedule.ZERO_BUBBLE and not by_input:
            return sum(block.forward for block in blocks)
        others = self.layout.pipeline_parallel - 1
        redone = others * self._least_redo() if self.layout.recompute is Recompute.FULL else 0.0
        passes = sum(block.forward + block.backward for block in blocks)
        if by_input:
            passes -= sum(block.backward_weight for block in blocks)
        return passes + redone + 2 * self.seconds.way

    def _least_redo(self) -> float:
        return min(block.recompute for _, block in self.seconds.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Room:
    """KiB of stages, rounded in favour of fitting."""

    memory: StageMemory
    layout: Layout

    def layer(self, rank: int, kind: int) -> int:
        """KiB of one layer that is not recomputed."""
        _, layer = self.memory.layers[kind]
        return floor((layer.states + self._in_flight(rank) * layer.kept) / KIB)

    def saved(self, rank: int) -> int:
        """KiB that recomputing one layer saves, at most."""
        gains = (layer.kept - layer.recomputed for _, layer in self.memory.layers)
        return ceil(self._in_flight(rank) * max(gains) / KIB)

    def base(self, rank: int) -> int:
        """KiB of a rank without layers."""
        memory, in_flight = self.memory, self._in_flight(rank)
        moving = memory.transient
        if self.layout.recompute is Recompute.FULL:
            moving = min(moving, memory.recompute_transient)
        held = memory.fixed
        if rank == 0:
            held += memory.embedding.states
        if rank == self.layout.pipeline_parallel - 1:
            # The logits of one micro-batch are not saved beside a layer's backward pass.
            moving = max(memory.head.transient, moving - memory.head.kept)
            held += memory.head.states + in_flight * memory.head.kept
        else:
            held += in_flight * memory.boundary
        return floor((held + moving) / KIB)

    def _in_flight(self, rank: int) -> int:
        return max(sum(moment) for moment in self.memory.moments[rank])
