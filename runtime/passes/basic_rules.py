"""Placement rules that fit many operations: whole on every rank, or element by element."""

from torch import Tensor
from torch.fx import Node

from runtime.passes.placements import Placement, Replicated, Sharded
from runtime.passes.sharder import Sharder


def whole(sharder: Sharder, node: Node) -> Placement:
    """Place a result that every rank computes whole, from whole inputs."""
    for source in node.all_input_nodes:
        sharder.note_gradient(source, is_partial=False)
    return Replicated()


def done_whole(sharder: Sharder, node: Node) -> Placement:
    """Do an operation without a rule whole on every rank, and warn."""
    sharder.warnings.append(
        f"{node.meta['module']}: no rule cuts {node.target}; it is done whole on every rank"
    )
    for source in node.all_input_nodes:
        node.replace_input_with(source, sharder.to_replicated(source, node, uses_differ=False))
    return whole(sharder, node)


def pointwise(sharder: Sharder, node: Node) -> Placement:
    """Work on elements alone: all operands are cut alike, those that broadcast stay whole."""
    rank = node.meta["val"].dim()
    operands = [i for i in node.all_input_nodes if isinstance(i.meta.get("val"), Tensor)]
    cuts: dict[int, int] = {}
    for operand in operands:
        at = sharder.placement(operand)
        if isinstance(at, Sharded):
            cuts[at.dim + rank - operand.meta["val"].dim()] = at.num_segments
    if len(cuts) != 1:
        return done_whole(sharder, node)
    ((dim, num_segments),) = cuts.items()
    for operand in operands:
        own = dim - rank + operand.meta["val"].dim()
        if not isinstance(sharder.placement(operand), Replicated):
            continue
        if own >= 0 and operand.meta["val"].shape[own] != 1:
            node.replace_input_with(operand, sharder.to_sharded(operand, own, node))
        elif operand.op == "get_attr":
            sharder.note_gradient(operand, is_partial=True)
        else:
            node.replace_input_with(operand, sharder.to_replicated(operand, node, uses_differ=True))
    return Sharded(dim, num_segments)
