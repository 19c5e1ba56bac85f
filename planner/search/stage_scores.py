"""From costs to integers: scores and memory of the stages that a layout's layers may make.

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
value. Memory is what `costmodels/memory/stages.py` says of the moment that fills a rank's layers
most, with what waits for input and for weight gradients apart, in KiB, rounded in favour of
fitting; the exact models judge every split that comes back.
"""

from dataclasses import dataclass, replace
from math import ceil, floor

from costmodels.bounds.time import around_rows
from costmodels.hardware import Cluster
from costmodels.job import TrainingJob
from costmodels.layout import Layout, Recompute, Schedule, split_layers
from costmodels.layout_table import table_of
from costmodels.memory.activations import LayerBytes
from costmodels.memory.blocks import BlockMemory
from costmodels.memory.moments import Moment
from costmodels.memory.stages import MovingBytes, StageMemory, stage_memory
from costmodels.model import ModelSpec
from costmodels.time.estimate import stage_costs
from costmodels.time.layouts import LayoutCosts
from costmodels.time.stage_costs import BlockSeconds, StageCosts
from costmodels.units import KIB
from planner.search.stage_problem import NANOSECONDS, ScoredProblem, StageProblem


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
    memory = stage_memory(model, job, cluster, layout, blocks, limit=limit)
    once, stretch = around_rows(model, job, cluster, table_of([layout]), costs)
    kinds = [kind for kind, _ in seconds.layers]
    ranks = range(layout.pipeline_parallel)
    is_full = layout.recompute is Recompute.FULL
    scores = _Scores(
        seconds=seconds,
        layout=layout,
        layers=tuple((block, model.layer_kinds.count(kind)) for kind, block in seconds.layers),
        redone=_least_redone(model, layout, seconds),
    )
    activations = dict(zip(blocks.kinds, blocks.layer_bytes, strict=True))
    room = _Room(
        memory=memory,
        layout=layout,
        limit=limit,
        activations=tuple(activations[replace(kind, window=None)] for kind, _ in memory.layers),
    )
    problem = StageProblem(
        kind_of_layer=tuple(kinds.index(kind) for kind in model.layer_kinds),
        cost=tuple(tuple(scores.layer(r, block) for _, block in seconds.layers) for r in ranks),
        base=tuple(scores.base(r) for r in ranks),
        redo_cost=tuple(scores.redo(r) for r in ranks),
        holds=tuple(tuple(room.layer(r, kind) for kind in range(len(kinds))) for r in ranks),
        held=tuple(room.base(r) for r in ranks),
        saved=tuple(room.saved(r) if is_full else 0 for r in ranks),
        brought_back=tuple(room.brought_back(r) if is_full else 0 for r in ranks),
        capacity=ceil(limit / KIB),
        least_recomputed=int(is_full),
        most_recomputed=model.num_layers - layout.pipeline_parallel + 1 if is_full else 0,
        hint=split_layers(model.num_layers, layout.pipeline_parallel),
    )
    return ScoredProblem(problem=problem, once=float(once[0]), stretch=stretch)


def _least_redone(model: ModelSpec, layout: Layout, seconds: StageCosts) -> tuple[float, ...]:
    """Return seconds of recomputing the cheapest layer that each rank may hold.

    Every other rank holds a layer, so the first and last ones are out of reach for some.
    """
    by_kind = {kind: block.recompute for kind, block in seconds.layers}
    each = [by_kind[kind] for kind in model.layer_kinds]
    spare = model.num_layers - layout.pipeline_parallel
    if len(set(each)) == 1:
        return (each[0],) * layout.pipeline_parallel
    return tuple(min(each[rank : rank + spare + 1]) for rank in range(layout.pipeline_parallel))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scores:
    """Nanoseconds of stages, rounded down."""

    seconds: StageCosts
    layout: Layout
    layers: tuple[tuple[BlockSeconds, int], ...]  # one of each kind, and how many there are
    redone: tuple[float, ...]  # of each rank, by the cheapest layer that it may recompute

    def layer(self, rank: int, block: BlockSeconds) -> int:
        """Score of one layer on a rank."""
        return floor(self._share(rank, block) * NANOSECONDS)

    def base(self, rank: int) -> int:
        """Score of a rank without layers: its ends, and what every rank waits for."""
        return floor(self._fixed(rank, by_input=self._ends_with_input(rank)) * NANOSECONDS)

    def redo(self, rank: int) -> int:
        """Score of recomputing one layer of a rank in every micro-batch."""
        return floor(self.layout.num_micro_batches * self.redone[rank] * NANOSECONDS)

    def _ends_with_input(self, rank: int) -> bool:
        """Whether the way over the last input gradient is the longer one for the even split."""
        if self.layout.schedule is not Schedule.ZERO_BUBBLE:
            return False

        def seconds(*, by_input: bool) -> float:
            shares = sum(
                count * self._share_of(rank, layer, by_input=by_input)
                for layer, count in self.layers
            )
            return self._fixed(rank, by_input=by_input) + shares / self.layout.pipeline_parallel

        return seconds(by_input=True) > seconds(by_input=False)

    def _fixed(self, rank: int, *, by_input: bool) -> float:
        last = self.layout.pipeline_parallel - 1
        own = 0.0
        if rank == 0:
            own += self._share_of(rank, self.seconds.embedding, by_input=by_input)
        if rank == last:
            own += self._share_of(rank, self.seconds.head, by_input=by_input)
        return own + self._way_through(rank, by_input=by_input)

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

    def _way_through(self, rank: int, *, by_input: bool) -> float:
        """Seconds of a micro-batch through all ranks that come on top of every rank's work."""
        blocks = [*self.layers, (self.seconds.embedding, 1), (self.seconds.head, 1)]
        if self.layout.schedule is Schedule.ZERO_BUBBLE and not by_input:
            return sum(count * block.forward for block, count in blocks)
        redone = 0.0
        if self.layout.recompute is Recompute.FULL:
            redone = sum(self.redone[:rank]) + sum(self.redone[rank + 1 :])
        passes = sum(count * (block.forward + block.backward) for block, count in blocks)
        if by_input:
            passes -= sum(count * block.backward_weight for block, count in blocks)
        return passes + redone + 2 * self.seconds.way


@dataclass(frozen=True, slots=True, kw_only=True)
class _Room:
    """KiB of stages, rounded in favour of fitting."""

    memory: StageMemory
    layout: Layout
    limit: float
    activations: tuple[LayerBytes, ...]  # of one layer of each kind

    def layer(self, rank: int, kind: int) -> int:
        """KiB of one layer that is not recomputed."""
        _, layer = self.memory.layers[kind]
        return floor((layer.states + self._waits(self._moment(rank), kind)) / KIB)

    def saved(self, rank: int) -> int:
        """KiB that recomputing one layer saves, at most."""
        moment = self._moment(rank)
        gains = (
            self._waits(moment, kind) - self._waits(moment, kind, again=True)
            for kind in range(len(self.activations))
        )
        return ceil(max(0.0, *gains) / KIB)

    def base(self, rank: int) -> int:
        """KiB of a rank without layers, of which some are not recomputed."""
        return self._base(rank, self._moving(rank).some_kept)

    def brought_back(self, rank: int) -> int:
        """KiB on top of `base` where all layers of a rank are recomputed, each one whole."""
        moment, moving = self._moment(rank), self._moving(rank)
        if not (moment.before_b and any(moment.until_input)):
            return 0  # what comes back between split halves waits with the micro-batch
        return max(0, self._base(rank, moving.all_recomputed) - self.base(rank))

    def _moving(self, rank: int) -> MovingBytes:
        """Return what layers of a rank meet while they run backward.

        Stages of one or two layers meet less than longer ones. Where two fit with what those meet,
        however they are recomputed, that excludes nothing.
        """
        many = self.memory.moving_of_many[rank]
        two_layers = 2 * max(self.layer(rank, kind) + 1 for kind in range(len(self.activations)))
        most = max(many.some_kept, many.all_recomputed)
        fits = self._base(rank, most) + two_layers < self.limit // KIB
        return many if fits else self.memory.moving[rank]

    def _base(self, rank: int, moving: float) -> int:
        memory, moment = self.memory, self._moment(rank)
        in_flight = moment.in_flight
        held = memory.fixed
        if rank == 0:
            held += memory.embedding.states
        if rank == self.layout.pipeline_parallel - 1:
            # The logits of one micro-batch are not saved beside a layer's backward pass.
            moving -= memory.head.kept
            if any(moment.until_input):  # else the head has run
                moving = max(memory.head.transient, moving)
            held += memory.head.states + in_flight * memory.head.kept
        else:
            held += in_flight * memory.boundary
        return floor((held + moving) / KIB)

    def _moment(self, rank: int) -> Moment:
        """Return the moment of a rank that layers which all are alike fill most."""
        again = self.layout.recompute is Recompute.FULL
        return max(
            self.memory.moments[rank],
            key=lambda moment: (self._waits(moment, 0, again=again), moment.in_flight),
        )

    def _waits(self, moment: Moment, kind: int, *, again: bool = False) -> float:
        """Bytes that a layer keeps for the micro-batches of a moment."""
        layer, raw = self.memory.layers[kind][1], self.activations[kind]
        kept, put_off = (raw.recomputed, raw.put_off_again) if again else (raw.kept, raw.put_off)
        allocated = layer.recomputed / float(raw.recomputed[0])  # by what is asked for
        waits = sum(moment.until_input) * float(kept[0]) + sum(moment.put_off) * float(put_off[0])
        return waits * allocated
