"""Which modules of a captured model are its repeated blocks, whatever their names.

Lists of modules (`model.layers.3.mlp`) say it by themselves. Where blocks are attributes of their
own (`block_a`, `block_b`), or stand in one list with what comes before and after them, they are
found by repetition: siblings whose parameters have the same names and shapes. Their nodes are then
filed under a list, `blocks.0`, `blocks.1`, in the order in which they run; parameters keep their
names, and the graph's meta says which modules "blocks" are.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable

import torch
from torch.fx import GraphModule, Node

_INDEX = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")
_FEWEST = 2  # blocks that repeat


def layer_of(path: str, container: str) -> int:
    """Return the index of the layer that a module path lies in, -1 outside of the container."""
    prefix = f"{container}." if container else ""
    if not path.startswith(prefix):
        return -1
    index = path.removeprefix(prefix).partition(".")[0]
    return int(index) if index.isdecimal() else -1


def container_of(paths: Iterable[str]) -> str | None:
    """Return the module list that holds the layers: the one with most nodes; None without lists.

    Args:
        paths: The module path of each node. Of a list within a list, the outer one counts more.

    """
    counts: Counter[str] = Counter()
    for path in paths:
        for match in _INDEX.finditer(path):
            counts[path[: match.start()]] += 1
    if not counts:
        return None
    return max(sorted(counts, key=len), key=lambda path: counts[path])


def number_blocks(graph: GraphModule) -> None:
    """File the nodes of repeated blocks under a list, unless they lie in one, in place."""
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    container = container_of(node.meta["module"] for node in nodes)
    if container is not None and not _holds_embedding(nodes, container):
        return
    blocks = _repeated(graph, nodes)
    if len(blocks) < _FEWEST:
        return
    parent = blocks[0].rpartition(".")[0]
    filed = f"{parent}.blocks" if parent else "blocks"
    graph.meta["blocks"] = tuple(blocks)
    names = {block: f"{filed}.{i}" for i, block in enumerate(blocks)}
    for node in graph.graph.nodes:
        for block, name in names.items():
            if _lies_in(node, block):
                node.meta["module"] = name + node.meta["module"].removeprefix(block)
                break
        else:
            if container is not None:  # what stands beside blocks in their list is no layer
                node.meta["module"] = f"rest.{node.meta['module']}".replace(".", "_")


def _holds_embedding(nodes: list[Node], container: str) -> bool:
    return any(
        node.target is torch.ops.aten.embedding.default
        and layer_of(node.meta["module"], container) >= 0
        for node in nodes
    )


def _repeated(graph: GraphModule, nodes: list[Node]) -> list[str]:
    """Return the largest group of siblings with equal parameters, in the order of the graph."""
    shapes: dict[str, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
    for name, parameter in graph.named_parameters():
        words = name.split(".")
        for depth in range(1, len(words)):
            owner = ".".join(words[:depth])
            shapes[owner].append((".".join(words[depth:]), tuple(parameter.shape)))
    groups: dict[tuple[str, tuple[object, ...]], list[str]] = defaultdict(list)
    for path, held in shapes.items():
        groups[path.rpartition(".")[0], tuple(sorted(held))].append(path)
    repeating = [(held, paths) for (_, held), paths in groups.items() if len(paths) >= _FEWEST]
    if not repeating:
        return []
    _, paths = max(repeating, key=lambda group: len(group[0]) * len(group[1]))
    place = {
        path: min(
            (i for i, node in enumerate(nodes) if _lies_in(node, path)),
            default=len(nodes),
        )
        for path in paths
    }
    return sorted(paths, key=lambda path: place[path])


def _lies_in(node: Node, path: str) -> bool:
    module: str = node.meta["module"]
    return module == path or module.startswith(f"{path}.")
