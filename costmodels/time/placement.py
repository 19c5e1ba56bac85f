"""Where the groups of each axis lie on the tiers: ranks inside a scale-up domain, and domains.

Ranks are numbered with the first axis of `rank_order` varying fastest, and fill one scale-up domain
(NVLink, xGMI or PCIe) after another. An axis of size n whose neighbours are `stride` ranks apart
has

    inner = clamp(domain / stride, 1, n)    ranks of a group in one domain
    outer = ceil(n / inner)                 domains that a group spans

Axes that share a communicator (data and context for gradients; expert over tensor, context and
data) multiply. The network bandwidth of a profile is per GPU, so groups that cross nodes at the
same time do not share a port; ranks of one group in a domain pool theirs.
"""

from dataclasses import dataclass

import numpy as np

from costmodels.hardware import Cluster
from costmodels.layout import Layout
from costmodels.layout_table import IntColumn, LayoutTable, table_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """A group of ranks on the two tiers, one entry per row."""

    inner: IntColumn
    outer: IntColumn

    @property
    def ranks(self) -> IntColumn:
        """Ranks of a group."""
        return self.inner * self.outer


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Tiers of every group of a table's layouts.

    Attributes:
        tensor: Tensor-parallel group.
        context: Context-parallel group.
        data: All ranks that hold the same dense weights: data x context.
        zero: Ranks that a dense state is cut over (`zero_group` of the data group).
        replica: Copies of a shard across zero groups (HSDP); 1 x 1 without.
        expert: Expert-parallel group, folded over tensor, context and data.
        expert_tensor: Expert-tensor-parallel group.
        expert_data: Ranks that hold the same experts.
        pipeline: The ranks of a pipeline; every `inner`-th hop between them leaves a domain.

    """

    tensor: Tiers
    context: Tiers
    data: Tiers
    zero: Tiers
    replica: Tiers
    expert: Tiers
    expert_tensor: Tiers
    expert_data: Tiers
    pipeline: Tiers


_SIZE_COLUMNS = {
    "tp": "tensor_parallel",
    "cp": "context_parallel",
    "dp": "data_parallel",
    "pp": "pipeline_parallel",
}


def axis_strides(table: LayoutTable) -> dict[str, IntColumn]:
    """Return the distance in ranks between neighbours of each axis, one entry per row."""
    sizes = {axis: getattr(table, column) for axis, column in _SIZE_COLUMNS.items()}
    strides = {axis: np.ones(len(table), dtype=np.int64) for axis in sizes}
    for code, order in enumerate(table.rank_orders):
        rows = table.rank_order == code if len(table.rank_orders) > 1 else slice(None)
        stride = np.ones(len(table), dtype=np.int64)[rows]
        for axis in order:
            strides[axis][rows] = stride
            stride = stride * sizes[axis][rows]
    return strides


def span(domain: int, size: IntColumn, stride: IntColumn) -> Tiers:
    """Return the tiers of groups of `size` ranks that are `stride` apart."""
    inner = np.minimum(np.maximum(domain // stride, 1), size)
    return Tiers(inner=inner, outer=-(-size // inner))


def place(layouts: LayoutTable | Layout, cluster: Cluster) -> Placement:
    """Place every group of each layout on the cluster's tiers.

    Args:
        layouts: A table, or one layout (a table of one row).
        cluster: Gives the size of a scale-up domain.

    """
    table = table_of([layouts]) if isinstance(layouts, Layout) else layouts
    domain = min(cluster.scale_up_size, cluster.num_gpus)
    stride = axis_strides(table)
    tp, cp, dp = table.tensor_parallel, table.context_parallel, table.data_parallel
    ep, etp = table.expert_parallel, table.expert_tensor_parallel
    context = span(domain, cp, stride["cp"])
    along_data = span(domain, dp, stride["dp"])
    data = Tiers(inner=context.inner * along_data.inner, outer=context.outer * along_data.outer)
    group = np.clip(table.zero_group, 1, dp * cp)
    one = np.ones(len(table), dtype=np.int64)
    cut_inside = np.minimum(data.inner, group)
    replicas = dp * cp // group
    copies_inside = np.maximum(np.minimum(data.inner // cut_inside, replicas), one)
    expert = span(domain, ep, etp)
    sharing = np.maximum(tp * cp * dp // (ep * etp), 1)
    return Placement(
        tensor=span(domain, tp, stride["tp"]),
        context=context,
        data=data,
        zero=Tiers(inner=cut_inside, outer=-(-group // cut_inside)),
        replica=Tiers(inner=copies_inside, outer=-(-replicas // copies_inside)),
        expert=expert,
        expert_tensor=span(domain, etp, one),
        expert_data=span(domain, sharing, ep * etp),
        pipeline=span(domain, table.pipeline_parallel, stride["pp"]),
    )
