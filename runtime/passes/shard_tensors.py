"""Cut parameters and activations over the tensor axis and make the communication explicit.

One walk over the graph gives each value a placement, from those of its inputs and the roles of the
parameters. Where an operation needs another placement, a collective is inserted; it is made once
per value, so queries, keys and values share one gather. With sequence parallelism (Korthikanti et
al., arXiv:2205.05198) what lies between the parallel regions is cut along the sequence:

    before                                  after, sequence parallel on 8 ranks
    norm = rms_norm(x, w)                   norm = rms_norm(x, w)            x: [b, s/8, H]
    q = linear(norm, wq)                    full = all_gather(norm, mesh, "tp", 1)
    ...                                     q = linear(full, wq)            wq: [A*D/8, H]
    out = linear(heads, wo)                 part = linear(heads, wo)        wo: [H, A*D/8]
                                            out = reduce_scatter(part, mesh, "tp", 1)

Without it, `copy_to` and `reduce_from` stand in the same places. A parameter that every rank holds
but applies to its own part of a value gets only a part of its gradient: its shard says to sum it.
"""

from torch import Tensor
from torch.fx import GraphModule

from runtime.passes.pipeline import LoweringContext, all_nodes
from runtime.passes.placement_rules import place
from runtime.passes.roles import infer_roles
from runtime.passes.sharder import Sharder


def shard_tensors(graph: GraphModule, context: LoweringContext) -> GraphModule:
    """Give every value a placement on the tensor axis; parameters become local shards on meta.

    Raises:
        ValueError: A parameter that should be cut does not divide by the axis.

    """
    if "mesh" in {node.target for node in graph.graph.nodes if node.op == "placeholder"}:
        return graph
    sharder = Sharder(graph, context, infer_roles(graph))
    for node in list(graph.graph.nodes):
        sharder.placements[node] = place(sharder, node)
    sharder.finish()
    return graph


def every_value_has_a_placement(graph: GraphModule, context: LoweringContext) -> None:
    """Every tensor says how it lies on the tensor axis, and parameters have their local shape."""
    layout = context.layout
    sizes = {
        None: 1,
        "tp": layout.tensor_parallel,
        "etp": layout.expert_tensor_parallel,
        "ep": layout.expert_parallel,
    }
    for node in all_nodes(graph):
        if isinstance(node.meta.get("val"), Tensor) and node.op != "output":
            assert "placement" in node.meta, f"{node.name} has no placement"
        shard = node.meta.get("shard")
        if shard is not None:
            local = tuple(node.meta["local"].shape)
            whole = shard.local_shape(sizes[shard.axis], sizes[shard.block_axis])
            assert local == whole, f"{shard.name} is {local}, not {whole}"
