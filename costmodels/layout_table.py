"""LayoutTable: many layouts as a struct of arrays, for the vectorised model and the search.

One int64 column per degree or choice; enumerations are stored as their position in the
enumeration, switches as 0 or 1. `layers_per_stage` is left out: the partition of layers is
decided per layout, after the bound (see planner/search/ranking.py).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodels.layout import (
    AXES,
    ContextParallelType,
    Layout,
    Offload,
    Recompute,
    Schedule,
)

IntColumn = NDArray[np.int64]

SCHEDULES = tuple(Schedule)
RECOMPUTES = tuple(Recompute)
CONTEXT_PARALLEL_TYPES = tuple(ContextParallelType)


def _code(members: Sequence[StrEnum], value: StrEnum) -> int:
    return members.index(value)


def is_one_of(schedule: IntColumn, *schedules: Schedule) -> NDArray[np.bool_]:
    """Return where positions in SCHEDULES name one of some schedules.

    For so few of them comparing is several times as fast as `np.isin`.
    """
    none = np.zeros(np.shape(schedule), dtype=np.bool_)
    return reduce(np.logical_or, [schedule == SCHEDULES.index(s) for s in schedules], none)


def distinct(values: IntColumn) -> IntColumn:
    """Return the distinct values (or rows) of an array, ascending."""
    # Asked for positions too, numpy does not import numpy.ma, which takes 40 ms.
    axis = 0 if values.ndim > 1 else None
    return np.unique(values, axis=axis, return_index=True)[0]


# Columns that hold a Layout's field as it is, and those that hold true as 1.
_COUNTS = (
    "data_parallel",
    "tensor_parallel",
    "pipeline_parallel",
    "context_parallel",
    "expert_parallel",
    "expert_tensor_parallel",
    "zero_stage",
    "zero_group",
    "micro_batch_size",
    "num_micro_batches",
    "stages_per_rank",
)
_SWITCHES = ("keep_gathered", "sequence_parallel")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutTable:
    """Columns of equal length, one row per layout (see Layout for the meaning of each).

    A column that has one value everywhere may be a `constant`; it costs nothing to take or repeat.
    Splits of layers have no column, but for what a search lets the last stage give up where ranks
    have several stages (`lighter_last`, see `virtual_splits.py`).
    """

    data_parallel: IntColumn
    tensor_parallel: IntColumn
    pipeline_parallel: IntColumn
    context_parallel: IntColumn
    expert_parallel: IntColumn
    expert_tensor_parallel: IntColumn
    zero_stage: IntColumn
    zero_group: IntColumn
    keep_gathered: IntColumn
    micro_batch_size: IntColumn
    num_micro_batches: IntColumn
    stages_per_rank: IntColumn
    lighter_last: IntColumn
    schedule: IntColumn
    recompute: IntColumn
    sequence_parallel: IntColumn
    context_parallel_type: IntColumn
    offload_optimizer: IntColumn
    offload_parameters: IntColumn
    offload_activations: IntColumn
    rank_orders: tuple[tuple[str, ...], ...] = (AXES,)
    rank_order: IntColumn

    def __len__(self) -> int:
        """Return the number of layouts."""
        return len(self.data_parallel)

    @property
    def puts_off(self) -> NDArray[np.bool_]:
        """Rows that may run weight gradients later than input gradients."""
        splits = is_one_of(self.schedule, Schedule.ZERO_BUBBLE, Schedule.ZBV, Schedule.DUALPIPEV)
        return np.asarray((self.pipeline_parallel > 1) & splits)

    @property
    def is_v_shaped(self) -> NDArray[np.bool_]:
        """Rows whose first rank holds both ends of the network."""
        return is_one_of(self.schedule, *(s for s in Schedule if s.is_v_shaped))

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> "LayoutTable":
        """Return a table of some rows."""
        count = int(np.count_nonzero(rows)) if rows.dtype == np.bool_ else len(rows)
        return self._each(lambda column: column[rows], count)

    def repeated(self, times: int) -> "LayoutTable":
        """Return every row so many times, one after another."""
        return self._each(lambda column: np.repeat(column, times), len(self) * times)

    def _each(self, change: Callable[[IntColumn], IntColumn], count: int) -> "LayoutTable":
        """Return the table with columns changed to some length; constants stay constants."""
        columns = {}
        for name in COLUMNS:
            column = getattr(self, name)
            is_constant = column.strides == (0,)
            columns[name] = np.broadcast_to(column[:1], count) if is_constant else change(column)
        return LayoutTable(rank_orders=self.rank_orders, **columns)

    def layout(self, row: int, layers_per_stage: tuple[int, ...], recompute_layers: int) -> Layout:
        """Return one row as a Layout with its partition of layers."""
        offload = tuple(o for o in Offload if getattr(self, f"offload_{o.value}")[row])
        plain: dict[str, Any] = {name: int(getattr(self, name)[row]) for name in _COUNTS}
        plain |= {name: bool(getattr(self, name)[row]) for name in _SWITCHES}
        return Layout(
            **plain,
            schedule=SCHEDULES[self.schedule[row]],
            recompute=RECOMPUTES[self.recompute[row]],
            recompute_layers=recompute_layers,
            context_parallel_type=CONTEXT_PARALLEL_TYPES[self.context_parallel_type[row]],
            offload=offload,
            layers_per_stage=layers_per_stage,
            rank_order=self.rank_orders[self.rank_order[row]],
        )


COLUMNS = tuple(f.name for f in fields(LayoutTable) if f.name != "rank_orders")


def constant(value: int, count: int) -> IntColumn:
    """Return a column of one value, which takes the memory of one entry."""
    return np.broadcast_to(np.int64(value), (count,))


def table_of(layouts: Iterable[Layout]) -> LayoutTable:
    """Build a table from layouts (partitions are dropped)."""
    rows = list(layouts)
    orders = tuple(dict.fromkeys(layout.rank_order for layout in rows)) or (AXES,)

    def column(values: Iterator[int]) -> IntColumn:
        return np.fromiter(values, dtype=np.int64, count=len(rows))

    def offloads(part: Offload) -> IntColumn:
        return column(int(part in layout.offload) for layout in rows)

    plain = {
        name: column(int(getattr(layout, name)) for layout in rows)
        for name in (*_COUNTS, *_SWITCHES)
    }
    return LayoutTable(
        **plain,
        lighter_last=constant(0, len(rows)),
        schedule=column(_code(SCHEDULES, layout.schedule) for layout in rows),
        recompute=column(_code(RECOMPUTES, layout.recompute) for layout in rows),
        context_parallel_type=column(
            _code(CONTEXT_PARALLEL_TYPES, layout.context_parallel_type) for layout in rows
        ),
        offload_optimizer=offloads(Offload.OPTIMIZER),
        offload_parameters=offloads(Offload.PARAMETERS),
        offload_activations=offloads(Offload.ACTIVATIONS),
        rank_orders=orders,
        rank_order=column(orders.index(layout.rank_order) for layout in rows),
    )
