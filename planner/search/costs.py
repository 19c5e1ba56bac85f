"""Costs: everything that the search asks of the cost models, and nothing else.

The search knows layouts, seconds and bytes; this is the seam to the models, and a test can put
another one in its place. Bounds hold for tables, exact answers are for one layout with its split:

    open_seconds       what no completion of a partial layout goes below
    seconds_bound      what no split of a layout's layers goes below
    memory_bound       the same for the bytes of the fullest rank
    split_bound        time and memory together, where any split is considered
    rooms              layers that ranks have room for
    least_recomputed   layers per stage that full recomputation must redo to fit
    memory, priced     exact
"""

from dataclasses import dataclass
from math import inf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from costmodels.bounds.memory import memory_lower_bound
from costmodels.bounds.pipeline import SplitLimits
from costmodels.bounds.put_off import put_off
from costmodels.bounds.recompute import least_recomputed_layers, with_recompute
from costmodels.bounds.reference import ReferenceBound, reference_bound
from costmodels.bounds.split import SplitBound, split_bound
from costmodels.bounds.stage_room import StageRooms, stage_rooms
from costmodels.bounds.time import open_lower_bound, time_lower_bound
from costmodels.hardware import Cluster
from costmodels.job import TrainingJob
from costmodels.layout import Layout, Recompute
from costmodels.layout_table import LayoutTable
from costmodels.memory.estimate import estimate_memory
from costmodels.memory.weight_bytes import least_state_bytes
from costmodels.model import ModelSpec
from costmodels.terms import MemoryEstimate
from planner.constraints import Constraints
from planner.search.priced import PricedTable

Values = NDArray[np.float64]


class Costs(Protocol):
    """What the search asks."""

    @property
    def capacity(self) -> float:
        """Bytes of a device that the driver leaves."""

    @property
    def host_capacity(self) -> float:
        """Bytes of host memory of a node."""

    def may_hold_states(self, share: float) -> bool:
        """Whether a share of all devices and the hosts together hold each weight's states once."""

    def open_seconds(
        self, table: LayoutTable, limits: SplitLimits, *, schedule_is_open: bool
    ) -> Values:
        """Return seconds that no completion of partial layouts within the limits goes below.

        Open are the ZeRO stage and group, the rank order, recomputation, offload and, with one
        stage per rank, the split; with `schedule_is_open` the schedule and the stages per rank too.
        """

    def seconds_bound(self, priced: PricedTable, limits: SplitLimits) -> Values:
        """Return seconds that no split within the limits goes below."""

    def memory_bound(
        self, table: LayoutTable, *, any_recompute: bool = False, limit: float = inf
    ) -> Values:
        """Return bytes of the fullest rank that no considered split goes below.

        With several stages per rank and no split stated, the row's own is considered. With
        `any_recompute` the bound holds whatever is recomputed. With a `limit` it only tells what
        may stay within it.
        """

    def least_recomputed(self, table: LayoutTable, limit: float) -> Values:
        """Return layers per stage to recompute so that a rank may fit `limit` bytes; inf: never."""

    def rooms(self, table: LayoutTable, limit: float) -> StageRooms:
        """Return how many layers the ranks of layouts have room for."""

    def split_bound(self, priced: PricedTable, limit: float) -> SplitBound:
        """Return the bounds of time under a memory limit, over all splits of one stage per rank."""

    def reference_bound(self, priced: PricedTable) -> ReferenceBound:
        """Return the bounds of layouts by simulated pipelines of their shape."""

    def memory(self, layout: Layout) -> MemoryEstimate:
        """Return the exact memory of one layout."""

    def priced(self, table: LayoutTable, least_recomputed: Values) -> PricedTable:
        """Return the exact models of complete layouts, for any of their splits.

        `least_recomputed` says how many layers each stage recomputes in full, at least.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """The cost models of package `costmodels`, for one job on one cluster.

    Attributes:
        known_splits: False where the user states the split.

    """

    model: ModelSpec
    job: TrainingJob
    cluster: Cluster
    known_splits: bool = True

    @classmethod
    def under(
        cls, model: ModelSpec, job: TrainingJob, cluster: Cluster, constraints: Constraints
    ) -> "ModelCosts":
        """Return the models of a job as a user constrains its layouts."""
        is_open = constraints.layers_per_stage is None
        return cls(model=model, job=job, cluster=cluster, known_splits=is_open)

    @property
    def capacity(self) -> float:
        """Bytes of a device that the driver leaves."""
        return self.cluster.usable_memory

    @property
    def host_capacity(self) -> float:
        """Bytes of host memory of a node."""
        return self.cluster.profile.host_memory

    def may_hold_states(self, share: float) -> bool:
        """See Costs."""
        devices = self.cluster.num_gpus * share * self.capacity
        hosts = self.cluster.num_nodes * self.host_capacity
        return least_state_bytes(self.model, self.job) <= devices + hosts

    def open_seconds(
        self, table: LayoutTable, limits: SplitLimits, *, schedule_is_open: bool
    ) -> Values:
        """See Costs."""
        return open_lower_bound(
            self.model,
            self.job,
            self.cluster,
            table,
            schedule_is_open=schedule_is_open,
            limits=limits,
        )

    def seconds_bound(self, priced: PricedTable, limits: SplitLimits) -> Values:
        """See Costs."""
        table, costs = priced.table, priced.costs
        return time_lower_bound(self.model, self.job, self.cluster, table, limits, costs=costs)

    def memory_bound(
        self, table: LayoutTable, *, any_recompute: bool = False, limit: float = inf
    ) -> Values:
        """See Costs."""
        bound = memory_lower_bound(
            self.model,
            self.job,
            self.cluster,
            table,
            known_splits=self.known_splits,
            any_recompute=any_recompute,
            limit=limit,
        )
        may = np.flatnonzero((bound <= limit) & table.puts_off)
        waits = table.take(may)
        if not any_recompute:
            bound[may] = np.maximum(bound[may], self._put_off(waits, limit))
            return bound
        # Between the halves selective recomputation may keep less than full brings back.
        least = self._put_off(with_recompute(waits, Recompute.FULL), limit)
        over = np.flatnonzero((least > limit) | np.isinf(limit))
        selective = with_recompute(waits.take(over), Recompute.SELECTIVE)
        least[over] = np.minimum(least[over], self._put_off(selective, limit))
        bound[may] = np.maximum(bound[may], least)
        return bound

    def _put_off(self, table: LayoutTable, limit: float) -> Values:
        inputs = (self.model, self.job, self.cluster)
        return put_off(*inputs, table, limit=limit, known_splits=self.known_splits).bound

    def least_recomputed(self, table: LayoutTable, limit: float) -> Values:
        """See Costs."""
        return least_recomputed_layers(
            self.model, self.job, self.cluster, table, limit=limit, known_splits=self.known_splits
        )

    def rooms(self, table: LayoutTable, limit: float) -> StageRooms:
        """See Costs."""
        return stage_rooms(self.model, self.job, self.cluster, table, limit=limit)

    def split_bound(self, priced: PricedTable, limit: float) -> SplitBound:
        """See Costs."""
        table, costs = priced.table, priced.costs
        return split_bound(self.model, self.job, self.cluster, table, limit=limit, costs=costs)

    def reference_bound(self, priced: PricedTable) -> ReferenceBound:
        """See Costs."""
        table, costs = priced.table, priced.costs
        return reference_bound(self.model, self.job, self.cluster, table, costs=costs)

    def memory(self, layout: Layout) -> MemoryEstimate:
        """See Costs."""
        return estimate_memory(self.model, self.job, self.cluster, layout)

    def priced(self, table: LayoutTable, least_recomputed: Values) -> PricedTable:
        """See Costs."""
        return PricedTable(
            model=self.model,
            job=self.job,
            cluster=self.cluster,
            table=table,
            least_recomputed=least_recomputed,
        )
