"""Some rows of what was priced for a whole table: nested dataclasses and tuples of arrays."""

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


def take_rows(value: T, rows: NDArray[np.int64], num_rows: int) -> T:
    """Return a value with some rows of each of its arrays, in the order asked for.

    Args:
        value: Arrays whose last axis is the table's rows, in dataclasses and tuples; what has
            another last axis, or none, holds for every row and stays.
        rows: Positions.
        num_rows: Rows of the table.

    """
    taken: Any = value
    if isinstance(value, np.ndarray):
        if value.ndim and value.shape[-1] == num_rows:
            taken = value[..., rows]
    elif isinstance(value, tuple):
        taken = tuple(take_rows(part, rows, num_rows) for part in value)
    elif is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in fields(value)]
        taken = replace(
            value, **{name: take_rows(getattr(value, name), rows, num_rows) for name in names}
        )
    return taken  # type: ignore[no-any-return]  # built from Any; the same type as `value`
